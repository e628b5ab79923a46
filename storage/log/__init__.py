"""What decides, as an append-only log: entries, the fold over them, appending and following, snapshots, retention."""
