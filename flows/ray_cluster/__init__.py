"""Starts private Ray clusters, attaches to clusters, checks their nodes, and finds their actors."""
