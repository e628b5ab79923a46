"""Verifiers, and the worker processes they run in."""
