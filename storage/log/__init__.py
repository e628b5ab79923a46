"""The append-only log of a run: its entries, the fold over them, snapshots, audit and retention."""
