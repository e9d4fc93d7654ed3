"""Helpers of tests in several folders, about no part of the package in particular."""
