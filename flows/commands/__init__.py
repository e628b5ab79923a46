"""The command line: one file for each verb.

Exit codes: 0 (success), 1 (ran and failed), 2 (the user must change something), 130 (ended by Ctrl-C).
"""

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
