"""The code of the worker processes that run a user's environment class (see `keeper`).

The worker processes run in the user's Python interpreter, which may have no packages. Modules here import only the
standard library and each other, and are valid in Python 3.9.
"""
