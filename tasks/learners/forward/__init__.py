"""Contains the models that a learner runs in a train step: the policy and the reference policy, which compute
log-probs, and the critic, which estimates rewards."""
