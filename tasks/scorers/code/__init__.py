"""Scores programs that a model wrote. Module `scorer` scores a response, `cases` and `pytest_case` run test cases, and
`guest` and `pytest_guest` are the code inside the sandboxes.
"""
