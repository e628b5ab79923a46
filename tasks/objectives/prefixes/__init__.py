"""Lays out rows (trajectories) so that leading tokens that several rows share are processed once."""
