"""Provides what all processes of a run need: the config, storage access, prompts and user-defined code."""
