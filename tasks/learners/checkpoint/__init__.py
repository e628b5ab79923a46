"""Conversion between files and a learner's weights and state."""
