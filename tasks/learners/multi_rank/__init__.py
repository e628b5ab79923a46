"""A learner of several ranks: its first rank starts the other ranks, sends them orders and ends them."""
