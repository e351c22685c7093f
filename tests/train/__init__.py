"""Training: what is descended, what is stored, and that a killed run goes on."""
