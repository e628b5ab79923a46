"""Relates text to tokens: where tokens end in a text, and which text would become control tokens."""
