"""Timelines of runs and simulations, as text, HTML and PNG."""
