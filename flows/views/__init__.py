"""Shows a run to its users: live view, summary, tables, timelines, MLflow."""
