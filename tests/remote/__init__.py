"""Checkpoints in an object store: a real server, and a proxy that breaks what it passes on."""
