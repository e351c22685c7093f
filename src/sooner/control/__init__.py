"""How much to guess, request by request and step by step. Imports no torch."""
