"""C kernels, compiled on the user's machine at first use. Knows no model and no law."""
