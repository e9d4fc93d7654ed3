"""Inspection of a store's directory without a store: survey, verification and repair."""
