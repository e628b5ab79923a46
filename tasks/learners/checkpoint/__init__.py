"""A learner's state and weights as files."""
