"""The models of a train step and what they compute for tokens: the policy's and the reference's log-probs, and a
critic's values."""
