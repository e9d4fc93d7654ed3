"""DECIDE: plans every move and eviction. Pure: no torch, threads, clocks or files."""
