"""Proves a run's invariants from its storage: the audit, its checks, the repair of a log, and garbage."""
