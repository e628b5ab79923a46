"""Durable state of a run: records, object stores, the log, the trajectory store, the policy store and the channel."""
