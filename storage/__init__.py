"""Stores the durable state of a training run: its log, trajectory batches, policy versions and other records."""
