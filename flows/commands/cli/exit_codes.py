"""The exit codes of every command.

0: success. 1: the command ran and failed. 2: the user must change something. 130: Ctrl-C ended the command.
"""

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
