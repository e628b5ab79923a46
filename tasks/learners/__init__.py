"""Learners turn a trajectory batch into the next policy version."""
