"""Learners whose tensors are sharded across ranks: one contract (`backend`), implemented by FSDP2 and by DeepSpeed."""
