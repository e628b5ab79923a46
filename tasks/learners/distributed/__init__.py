"""The ranks of a learner: their sums, their protocol, and how a batch is divided among them. No module of this package
depends on a model."""
