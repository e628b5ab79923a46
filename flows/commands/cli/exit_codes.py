"""Defines the exit codes of all commands: 0 after success, 1 if the command failed, 2 if the user must change
something, and 130 after Ctrl-C.
"""

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
