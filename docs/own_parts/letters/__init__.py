"""Example of user-defined parts, about counting letters: prompts, a scorer, an objective, environments and a tool."""
