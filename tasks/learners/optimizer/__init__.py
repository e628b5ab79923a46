"""The trained tensors, their float32 master weights and AdamW, and the check that all numbers are finite."""
