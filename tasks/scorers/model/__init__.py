"""Scores responses with a reward model, a sequence-classification model in a Ray actor of its own.

config       the keys of `[reward]` with `kind = "model"`
folder       finds the model's files, and refuses a folder that cannot be used
inputs       converts a prompt and a response to the model's input
classifier   computes the scores of many inputs, in batches
scorer       queues responses, and sends them to the model's copies
"""
