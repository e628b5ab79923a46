"""Contains the code for several ranks (data-parallel processes) of a learner: how they communicate, add up tensors, and
divide a batch. No module of this package contains code for a specific model."""
