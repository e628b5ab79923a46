"""The models of a step and what they compute for tokens: log-probs, a critic's values, a reference's log-probs."""
