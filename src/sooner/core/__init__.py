"""The pure part: drafts, steps, laws, noise, verification. No I/O, no model, no clock, no state."""
