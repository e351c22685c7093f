"""Models behind one protocol, their lanes, and loading. The only folder that imports transformers."""
