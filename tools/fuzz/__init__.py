"""Coverage-guided fuzzing of everything that reads what somebody else may have written."""
