"""The code of the worker processes (called the guest) that run a user's environment class. `keeper` describes the
processes.

The guest runs in the user's Python interpreter, which may have no packages. These modules therefore import only the
standard library and each other, and their code is valid in Python 3.9.
"""
