"""The decoder, its layers, and everything that reads model files."""
