"""Benchmarks: one script per claim, each with its peers."""
