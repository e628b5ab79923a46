"""Defines the Ray actors of a training run; no other folder of `tasks` imports Ray."""
