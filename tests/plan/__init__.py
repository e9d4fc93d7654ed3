"""Tests of `tierstore.plan`."""
