"""Tests of `tierstore.model`."""
