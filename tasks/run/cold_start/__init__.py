"""Plays the demonstrations of a cold start (supervised training before the run) as episodes of the environment."""
