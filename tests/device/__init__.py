"""The pretend accelerator that the tests use in place of a GPU."""
