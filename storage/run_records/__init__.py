"""Stores the records of a run that are not in its log: recoveries, weight updates, CPU seconds and stop requests."""
