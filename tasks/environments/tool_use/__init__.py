"""The environment `tools`: the policy answers a question with the help of tools.

`play` plays an episode. `python_session` is the Python tool, `mcp` are the tools of MCP servers, and `places` opens the
tools of an episode and closes them.
"""
