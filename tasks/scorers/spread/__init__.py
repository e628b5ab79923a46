"""Spreads the responses of a run over several places that score: the reward actor, and its helpers on other nodes.

spread     the scorer that sends each response to the place with the fewest waiting responses
follower   decides the number of places from the queue of responses
members    starts, watches and ends the members of a fleet
fleet      the fleet of the helpers
"""
