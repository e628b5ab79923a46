"""The trained tensors with AdamW and float32 master weights, and checks that all numbers are finite."""
