"""Contains what all processes of a run need: the run's config, storage access, prompts and user-defined code."""
