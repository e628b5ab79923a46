"""Contains the durable state of a run: records, object stores, the log, trajectory batches, policies and the
channel.
"""
