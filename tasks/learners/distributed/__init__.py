"""Ranks, their sums, their protocol and their shares of a batch. Knows of no model."""
