"""What a run writes to MLflow and to its status while it trains."""
