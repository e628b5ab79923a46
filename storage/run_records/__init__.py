"""Stores records beside a run's log: recoveries, weight updates, CPU seconds and stop requests."""
