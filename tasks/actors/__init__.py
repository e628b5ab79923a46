"""Defines the Ray actors of a training run. No other folder of `tasks` imports Ray."""
