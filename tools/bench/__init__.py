"""Benchmarks: one script for each claim, each running its peers side by side."""
