"""Prompt sources of games: each source generates boards or deals, which the policy plays in an environment of the same
game.
"""
