"""Training drafters for a target: text, features, networks. Knows no engine and no drafter."""
