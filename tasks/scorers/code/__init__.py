"""Scores programs that a model wrote, by running them on test cases in sandboxes. `scorer` scores a response, `cases`
and `pytest_case` run test cases, and `guest` and `pytest_guest` run inside the sandboxes.
"""
