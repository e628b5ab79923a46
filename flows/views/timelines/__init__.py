"""Draws the timelines of simulated training runs as HTML pages and PNG pictures, and prints their figures as a
table.
"""
