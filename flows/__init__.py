"""Contains the parts of rollflow that decide what happens: Prefect flows, the run's config, the cluster and the command
line.
"""
