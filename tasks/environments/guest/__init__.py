"""The code of the worker processes (called the guest) that run a user's environment class. The module `keeper`
describes these processes.

The guest runs in the user's Python interpreter, which may have no packages. The guest's modules therefore import only
the standard library and each other, and their code is valid in Python 3.9.
"""
