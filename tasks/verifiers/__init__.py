"""Verifiers, and the processes they run in."""
