"""Fleets: groups of Ray actors that share the same kind of work, if possible on different nodes.

member    starts, calls and ends an actor of a fleet, and chooses its node
"""
