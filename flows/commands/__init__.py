"""The command line: a file for each verb. Exit codes: 0, 1 (ran and failed), 2 (a person must change something)."""

OK, FAILED, BAD_INPUT = 0, 1, 2
