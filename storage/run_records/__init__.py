"""Records beside a run's log: recoveries, weight updates, CPU seconds, stop requests."""
