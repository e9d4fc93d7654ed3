"""Forecasts for a checkpoint at some budgets, before it is loaded: reads, memory, waits."""
