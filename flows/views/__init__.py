"""Shows a training run to its users: as a live view, a summary, tables, timelines, and pages in Prefect."""
