"""Headrace beside other servers and engines: the same weights, the same work, the same minutes, one table.

    python -m tests.benchmarks.rivals --only openvino

makes a virtual environment for the rival in a cache folder, starts it and Headrace, lets both do the same
work in turn (A, B, A, B, so that a machine that slows down slows both), and prints a table of ratios. What
was measured is
kept: run it once for each rival, and the table grows; `--redo` measures again.
"""
