"""Defines the append-only log of a run: log entries, the rules for new entries, the run's state, snapshots and
retention.
"""
