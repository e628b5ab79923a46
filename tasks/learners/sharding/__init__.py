"""Learners whose weights, gradients and AdamW moments are sharded across ranks. Two backends implement the interface
for sharding: FSDP2 and DeepSpeed."""
