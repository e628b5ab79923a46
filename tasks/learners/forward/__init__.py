"""The models of a step and what they say of tokens: log-probs, values, reference."""
