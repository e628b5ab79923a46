"""Counting letters: prompts, a verifier, an objective and an environment of your own."""
