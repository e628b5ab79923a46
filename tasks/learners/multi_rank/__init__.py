"""A learner of several ranks (processes): the first rank starts the others, sends them commands and ends them."""
