"""Writes a run's metrics to MLflow, and the run's status to `status.json`, while the run trains."""
