"""The rollout side of a run, in plain asyncio: it runs on a virtual clock as on a real one. Nothing of Ray is in it."""
