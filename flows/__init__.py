"""Contains the Prefect flows, the reading of a run's configuration, the management of the Ray cluster, and the command
line.
"""
