"""The policy: its folder, tokenizer, model head and cold start."""
