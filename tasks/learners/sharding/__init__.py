"""Learners whose weights, gradients and AdamW moments are sharded across ranks. The interface of a sharding backend is
implemented by FSDP2 and by DeepSpeed."""
