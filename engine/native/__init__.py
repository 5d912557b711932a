"""Kernels in C++ for the CPU, called over a plain C interface. All of it has a counterpart in torch."""
