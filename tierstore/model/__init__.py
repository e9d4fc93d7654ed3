"""DESCRIBE: the frozen data that every other layer speaks in.

Nothing here imports torch, starts a thread or opens a file (but for `sizes`, which asks the
machine how much memory it has).
"""
