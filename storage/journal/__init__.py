"""Records that no decision depends on: recoveries, weight updates, CPU seconds."""
