"""Implements the commands of `rollflow`, with one module for each command. The package `cli` parses the options and
calls the command's function.
"""
