"""What the texts and the tokens of a tokenizer have to do with each other."""
