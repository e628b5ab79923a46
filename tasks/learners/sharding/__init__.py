"""Learners whose tensors are sharded across ranks: one contract (`backend`), FSDP2 and DeepSpeed behind it."""
