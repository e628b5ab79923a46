"""Restarts the crashed parts of a training run: Ray actors, inference engines, Prefect flow runs and services."""
