"""Converts a learner's weights and state to files, and files to weights and state."""
