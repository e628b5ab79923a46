"""Ranks of a learner (data-parallel training processes): how they add up tensors, how they communicate, and how a batch
is divided among them. No module of the package `learners.distributed` depends on a model."""
