"""Tests of `tierstore.observe`."""
