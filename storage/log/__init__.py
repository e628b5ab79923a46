"""The append-only log of a run: its entries, the rules for new entries, the run's state, snapshots and retention."""
