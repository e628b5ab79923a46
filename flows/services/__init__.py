"""Other people's processes that a run needs: Prefect, Ray, MLflow, each under a guard."""
