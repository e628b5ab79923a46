"""A policy whose parameters are all trained and published, in contrast to a policy with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollflow.tasks.learners.checkpoint.shards import Named
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.forward.reference import Reference, named_tensors
from rollflow.tasks.learners.forward.token_logprobs import TokenLogprobs
from rollflow.tasks.learners.optimizer.trained_tensors import TrainedTensors, check_fit


class TrainedPolicy(TrainedTensors):
    """A policy whose parameters are all trained."""

    def __init__(self, model: Any, config: TrainBase, given: Mapping[str, nn.Parameter] | None = None) -> None:
        """Set up the trained parameters: the parameters `given`, or by default all parameters of the model."""
        self.model = model
        super().__init__(given or dict(model.named_parameters()), config, config.learning_rate)

    def reference(self, every: int, token_logprobs: TokenLogprobs) -> Reference:
        """Return a frozen copy of the policy as reference policy, which is updated every `every` policy versions.

        `token_logprobs` computes log-probs under the trained policy.
        """
        return Reference(self.model, every)

    @contextmanager
    def use_published(self) -> Iterator[None]:
        """Make the model compute with the published weights during a `with` block. Gradients must not be computed
        inside the block."""
        yield

    def weights(self) -> dict[str, Tensor]:
        """Return the published weights by their Hugging Face names."""
        with self.use_published():
            return self._model_tensors()

    def weights_like(self) -> dict[str, Tensor]:
        """Return tensors with the names, shapes and types of the published weights, but with undefined values."""
        return self.weights()

    @torch.no_grad()
    def take(self, weights: Named) -> None:
        """Set the policy's weights to tensors that `weights` returned; the caller must call `load` next.

        Raises:
            Corrupt: one of the policy's weights is missing.
        """
        left = self._model_tensors()
        for name, tensor in weights:
            left.pop(name).copy_(tensor)
            del tensor  # free the memory of the file before the next file is read
        check_fit("the weights", {}, left)

    def _model_tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors by Hugging Face name."""
        return named_tensors(self.model)
