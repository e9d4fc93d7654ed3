"""Checkpoints in an object store: a real server, and a proxy that injects faults."""
