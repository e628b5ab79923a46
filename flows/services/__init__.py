"""Starts the processes that a run needs from other projects: Prefect, Ray and MLflow."""
