"""Defines the environment `tools`, in which the policy answers a question with the help of tools.

`play` plays an episode. `python_session` defines the Python tool, `mcp` defines the tools of MCP servers, and `places`
opens and closes the tools of an episode.
"""
