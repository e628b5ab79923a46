"""Flows decide: Prefect flows, the run's config, the cluster and the command line."""
