"""Draws the timelines of simulated training runs as HTML pages and PNG pictures, and prints the simulated times and
counts as a table.
"""
