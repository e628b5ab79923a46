"""Registers Prefect deployments with their forms, work pools and automations, and calls the Prefect API."""
