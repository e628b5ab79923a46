"""Trained tensors, AdamW, float32 master weights, and checks for NaN and infinity."""
