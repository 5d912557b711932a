"""Helpers shared by the tests: fakes with the real protocols, builders, checkers."""
