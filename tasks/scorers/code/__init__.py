"""Scores programs that a model wrote. Module `scorer` scores a response, `cases` runs test cases, and `guest` is the
code inside the sandboxes.
"""
