"""Contains the prompt sources of games and of seeds. The source of a game generates boards or deals, which the policy
plays in an environment of the same game.
"""
