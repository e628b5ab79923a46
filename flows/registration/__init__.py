"""Prefect deployments: their forms, work pool, automations, and the calls of Prefect's API."""
