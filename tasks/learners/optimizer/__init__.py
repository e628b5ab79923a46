"""Contains the trained tensors, the AdamW optimizer, float32 master weights, and checks for NaN and infinity."""
