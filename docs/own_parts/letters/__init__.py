"""Counting letters: a verifier, prompts and an objective of your own."""
