"""The reference policy: a frozen copy of the policy, against which the KL penalty is measured.

The reference policy has the weights of the first policy version. With `train.reference.every = n`, the weights of every
n-th policy version replace the weights of the reference policy. The weights of the reference policy are part of the
learner's state, so that any train step can be replayed after older versions were deleted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollflow.tasks.learners.base import WaitForPublish, no_wait
from rollflow.tasks.learners.checkpoint.shards import Named
from rollflow.tasks.learners.forward.token_logprobs import Pass, TokenLogprobs
from rollflow.tasks.learners.optimizer.trained_tensors import check_fit

VERSION = "version"  # key in the learner state: the policy version whose weights the reference policy has


class Reference:
    """A frozen copy of the policy, against which the KL penalty is measured."""

    def __init__(self, policy: Any, every: int) -> None:
        self._every = every
        self.now: Callable[[], dict[str, Tensor]] = partial(named_tensors, policy)  # returns the policy's tensors
        self._model = copy.deepcopy(policy).eval().requires_grad_(False)
        # The output head was tested with the policy, so it is not tested again.
        self.token_logprobs: Pass = TokenLogprobs(self._model, judged=False)
        self.version = -1  # policy version whose weights the reference policy has; -1 if it has no weights yet

    def follow(self, version: int, settle: WaitForPublish = no_wait) -> None:
        """Copy the policy's weights into the reference policy if `train.reference.every` requires it at policy version
        `version`.

        Call `follow` before policy version `version` is trained.
        """
        if self.version < 0 or (self._every and version % self._every == 0):
            settle()
            self._take(self.now())
            self.version = version

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the reference policy as tensors by name; return an empty mapping before the first train
        step.
        """
        return {**self._tensors_to_save(), VERSION: torch.tensor(self.version)} if self.version >= 0 else {}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Raise `Corrupt` if `saved` is not empty and its tensors differ from the reference policy's in name, shape or
        type."""
        if saved:
            check_fit("the reference", saved, {**self._tensors_to_save(), VERSION: torch.tensor(0)})

    @torch.no_grad()
    def load(self, saved: Named) -> None:
        """Replace the state of the reference policy by tensors that `tensors` returned."""
        self.version, own = -1, self._tensors_to_save()
        for name, tensor in saved:
            if name == VERSION:
                self.version = int(tensor)
            else:
                own[name].copy_(tensor)
            del tensor  # free the memory of the file before the next file is read

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors_to_save().items():
            tensor.copy_(weights[name])

    def _tensors_to_save(self) -> dict[str, Tensor]:
        """Return the tensors that the reference policy saves."""
        return named_tensors(self._model)


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Return a policy's tensors by their names in Hugging Face files. Tied tensors appear once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ())
    keep = {} if not model.config.tie_word_embeddings else tied
    return {n: t.detach().contiguous() for n, t in model.state_dict().items() if n not in keep}
