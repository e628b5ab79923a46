"""Stores the finished turns of unfinished episodes, so that a new scheduler continues these episodes after a crash."""
