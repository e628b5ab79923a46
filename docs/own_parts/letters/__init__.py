"""Counting letters: prompts, a scorer, an objective, environments and a tool of your own."""
