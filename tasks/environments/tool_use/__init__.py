"""Defines the environment `tools`, in which the policy answers a question with the help of tools.

`play` plays an episode, `python_session` and `mcp` define the tools, and `places` opens and closes the tools of an
episode.
"""
