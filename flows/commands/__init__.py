"""The command line: a file for each verb.

Exit codes: 0, 1 (ran and failed), 2 (a person must change something), 130 (ended by Ctrl-C).
"""

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
