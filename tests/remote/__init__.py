"""Checkpoints in an object store: real servers, and a proxy between that breaks what it passes on."""
