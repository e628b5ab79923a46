"""The processes that a run needs from other projects: Prefect, Ray and MLflow, each under a guard."""
