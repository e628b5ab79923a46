"""Contains the code for several ranks (data-parallel processes) of a learner: how they communicate, add up tensors, and
divide a batch. No module here contains code for a specific model."""
