"""Scores responses with a judge, a language model behind an OpenAI-compatible endpoint.

prompts     writes what the judge reads, so that a response cannot pose as an instruction, and reads the verdict
endpoint    calls the endpoint, with repeated tries, limits and a token budget
scorer      scores by one verdict, a rubric, or comparisons within a group; caches verdicts
"""
