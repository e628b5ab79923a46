"""What a person sees of a run: live view, summary, tables, timelines, MLflow."""
