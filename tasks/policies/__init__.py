"""The policy, which is the language model that a run trains: folder, tokenizer, model head and cold start."""
