"""Contains what all processes of a run need: the run's config, context, prompts and user-defined code."""
