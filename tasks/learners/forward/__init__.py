"""Contains the models of a train step: policy and reference policy, which compute log-probs, and the critic, which
estimates rewards."""
