"""Storage remembers: records, object stores, the run's log, the trajectory store, the policy store, the channel."""
