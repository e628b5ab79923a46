"""Contains the code for the policy, the language model that a run trains: folder, tokenizer, head and cold start."""
