"""The process inside a sandbox that runs an agent's commands and sessions in parallel (see `serve`).

Modules here import only the standard library, `box.wire`, `box.tree` and `host.files`, because a sandbox has no other
packages. `workspace` sends the source code of these modules to the sandbox.
"""
