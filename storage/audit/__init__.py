"""Checks a run's invariants from its storage alone, repairs a damaged log, and removes objects that no entry needs."""
