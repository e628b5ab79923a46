"""Runs a policy (a version of a run, or a Hugging Face folder) in this process on the prompts of a recipe."""
