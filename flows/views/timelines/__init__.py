"""Draws the timelines of simulated runs as HTML and PNG, and their figures as a table."""
