"""The programs that create and supervise sandboxes inside a box, the container that `bubblewrap` builds; see `start`.

These modules import only the standard library, because no other package exists in the box. `bubblewrap` builds the box.
"""
