"""Distributes the scoring of a run's responses over the reward actor and its helpers (further reward actors).

spread     the scorer that sends each response to the reward actor or helper with the fewest waiting responses
follower   decides from the queue of responses how many of these actors a run needs
members    starts, watches and ends the members of a fleet (actors that share work)
fleet      starts, watches and ends the helpers
"""
