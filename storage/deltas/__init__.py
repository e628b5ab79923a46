"""Stores the weights of a policy version as the difference to the version before, and rebuilds them byte for byte."""
