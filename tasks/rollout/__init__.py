"""The rollout side of a run, in plain asyncio without Ray: the code runs on a virtual clock and on a real one."""
