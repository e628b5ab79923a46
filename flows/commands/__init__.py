"""The commands of the command line: one file for each. `cli/` reads the options and runs the command."""
