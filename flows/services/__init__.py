"""Starts the external services that a run needs: Prefect, Ray and MLflow."""
