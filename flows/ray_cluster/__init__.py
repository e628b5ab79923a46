"""Starts private Ray clusters, connects to Ray clusters, checks the nodes of a cluster, and finds Ray actors."""
