"""A learner of several ranks as one: it starts the other ranks, orders them and ends them."""
