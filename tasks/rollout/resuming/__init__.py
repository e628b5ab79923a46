"""Lets a new scheduler continue where an earlier scheduler stopped, with the finished turns of unfinished episodes."""
