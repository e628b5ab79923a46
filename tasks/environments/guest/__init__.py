"""The guest: runs a user's environment class in processes of its own; see `keeper`.

The guest runs in the user's Python interpreter, which may have no packages. These modules therefore import only the
standard library and each other, and their code is valid in Python 3.9.
"""
