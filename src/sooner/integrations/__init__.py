"""Other libraries' own interfaces on our engine. Each file says whose; the engine knows none of them."""
