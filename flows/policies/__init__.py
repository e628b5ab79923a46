"""Asks a policy in this process, a version of a run or a Hugging Face folder, with the prompts of a recipe."""
