"""Contains the code for several ranks (data-parallel processes) of a learner: how they add up tensors, how they
communicate, and how a batch is divided among them. No module of the package `learners.distributed` contains code for a
specific model."""
