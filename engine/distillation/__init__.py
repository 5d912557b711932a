"""Makes a draft model for a target: its first layers, taught by the target itself."""
