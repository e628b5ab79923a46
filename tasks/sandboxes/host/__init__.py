"""The programs that create and supervise sandboxes that are plain or Landlock-confined processes of the host (see
`start`).

The modules of this package import only the standard library and, for the kind "sandlock", the package sandlock.
"""
