"""The process inside a sandbox that runs an agent's commands and sessions in parallel (see `serve`).

The modules of this package import only the standard library, `box.wire`, `box.tree` and `host.files`, because a sandbox
has no other packages. The module `workspace` sends the source code of this package to the sandbox.
"""
