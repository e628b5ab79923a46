"""Resumes the work of an earlier scheduler: the point in the run, and the finished turns of running episodes."""
