"""DECIDE: what to fetch early and what to put away. Pure: no torch, threads, clocks or files."""
