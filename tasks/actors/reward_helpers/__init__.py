"""Helpers of the reward actor, which score a part of its responses, if possible on other nodes.

calls     scoring requests and scores as they are sent between processes
actor     the Ray actor of a helper
reports   what helpers report, merged and summed
owner     starts the helpers of the reward actor, calls them and ends them
"""
