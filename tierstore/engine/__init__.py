"""SERVE: planner, mover and callers in agreement, under one lock.

`core.Core` is what is believed of the groups; parts that hold it do one thing each: leases, puts,
saves, groups by reference, mutable groups, saved tensors. `engine.Engine` puts them together. What
is changed is changed in transactions (`transaction.py`).
"""
