"""`tierstore-serve`: one process that holds the groups of all workers on the machine."""
