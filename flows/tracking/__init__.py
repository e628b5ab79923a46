"""Writes a run's metrics to MLflow and its status to `status.json` while it trains."""
