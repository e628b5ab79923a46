"""A learner of several ranks. The first rank starts the other ranks, sends commands to them and ends them."""
