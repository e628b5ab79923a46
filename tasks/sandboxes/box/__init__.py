"""The programs that create and supervise sandboxes inside the container that `bubblewrap` builds (see `start`).

These modules import only the standard library, because the container has no other packages.
"""
