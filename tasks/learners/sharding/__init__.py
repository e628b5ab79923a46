"""Learners whose weights, gradients and AdamW moments are sharded across ranks, by FSDP2 or DeepSpeed."""
