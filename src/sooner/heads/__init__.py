"""Draft heads: small networks on the target's features, and their file formats. Know no target and no engine."""
