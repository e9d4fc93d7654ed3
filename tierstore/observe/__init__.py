"""OBSERVE: what a store did and when, as notes, numbers, traces and metrics. Decides nothing."""
