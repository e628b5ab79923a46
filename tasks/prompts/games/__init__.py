"""Prompt sources of games: boards that the policy plays in an environment of the same kind."""
