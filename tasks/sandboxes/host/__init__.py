"""The programs that create sandboxes of host processes and watch them; see `start`.

These modules import only the standard library and, for one kind, sandlock.
"""
