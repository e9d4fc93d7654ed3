"""The planner against an independent account of everything it instructs."""
