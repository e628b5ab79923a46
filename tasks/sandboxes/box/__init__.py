"""The programs inside a box, which run no code of the model themselves; see `start`.

These modules import only the standard library, because nothing else is in the box. `bubblewrap` builds the box.
"""
