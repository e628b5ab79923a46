"""Checks a stored run for errors, repairs the run's damaged log, and removes objects that no log entry needs."""
