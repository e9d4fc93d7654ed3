"""`tierstore-serve`: one process that serves the groups of all others on the machine."""
