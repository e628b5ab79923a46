"""Generates the trajectories of a run, in plain asyncio without Ray, so that the code also runs on a virtual clock."""
