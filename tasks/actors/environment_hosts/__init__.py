"""Environment actors, which run the worker processes of environments, if possible on different nodes.

actor     the Ray actor
owner     starts the environment actors of the rollout actor, calls them and ends them
"""
