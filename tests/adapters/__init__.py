"""Adapters: real pipelines and models that run with their weights in a store."""
