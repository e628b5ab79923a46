"""Implements the commands of the command line, one module for each command. The package `cli` reads the options and
runs the command.
"""
