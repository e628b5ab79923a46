"""Ray actors among which the work of a fleet is spread, if possible on different nodes.

member    starts, calls and ends an actor of a fleet, and chooses its node
"""
