"""Which tokens each step computes. No torch."""
