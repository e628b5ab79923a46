"""The trained tensors: float32 master weights and AdamW; the check that all numbers are finite."""
