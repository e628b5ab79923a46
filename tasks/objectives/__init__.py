"""Losses, advantages and packing: pure torch."""
