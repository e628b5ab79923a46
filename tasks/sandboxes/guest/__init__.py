"""The program in a sandbox that runs commands and sessions side by side for the sandbox's owner; see `serve`.

These modules import only the standard library, `box.wire` and `box.tree`, because nothing else is in a sandbox.
`workspace` sends their source to the sandbox.
"""
