"""Generates the trajectories of a run; the code uses asyncio without Ray, so it also runs on a simulated clock."""
