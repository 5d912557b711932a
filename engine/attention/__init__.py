"""Attention over the paged cache: one protocol, several backends."""
