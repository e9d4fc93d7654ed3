"""Check the planner against independent books of all its instructions."""
