"""The append-only log that decides what a run is: entries, the fold over them, snapshots, audit, retention."""
