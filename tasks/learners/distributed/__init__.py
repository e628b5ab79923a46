"""Ranks, their sums, their protocol and their shares of a batch. No module of this package depends on a model."""
