"""SERVE: keep the planner, the mover and callers consistent, under one lock.

`core.Core` is the state of all groups. Each other part does one thing with it: leases, puts, saves,
registered groups, mutable groups, saved tensors. `engine.Engine` composes them. All changes are
made in transactions (`transaction.py`).
"""
