"""The models that a learner runs in a train step: the policy and the reference policy, which give log-probs, and the
critic, which gives values."""
