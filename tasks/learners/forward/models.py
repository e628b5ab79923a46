"""The models of a learner: the policy, and the critic and the reference policy if the objective needs them.

In shapes, B is the number of tokens with loss mask 1 in the batch, and M the number of such tokens in a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.learners.base import WaitForPublish, no_wait
from rollflow.tasks.learners.checkpoint.shards import SHARD_BYTES
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.distributed.ranks import Ranks
from rollflow.tasks.learners.forward.activation_checkpointing import recompute_layers
from rollflow.tasks.learners.forward.critic import Critic
from rollflow.tasks.learners.forward.path_attention import use_path_attention
from rollflow.tasks.learners.forward.sharing import find_sharing
from rollflow.tasks.learners.forward.token_logprobs import Pass, TokenLogprobs
from rollflow.tasks.learners.forward.trained_policy import TrainedPolicy
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.config import PartsObjective, Penalties
from rollflow.tasks.objectives.packing import MicroBatch, micro_batches
from rollflow.tasks.objectives.penalties import adapt_weight
from rollflow.tasks.objectives.prefixes.lines import Sharing
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.policies.device import find_device, send

LEAST_SHARE = 0.1  # smallest learning rate of a schedule, as a fraction of the highest learning rate


def _trained_policy(model: Any, config: TrainBase, first: Callable[[], Mapping[str, Tensor]]) -> TrainedPolicy:
    """Build the trained policy: all parameters are trained, or only a LoRA adapter. The package peft is imported only
    for a LoRA adapter."""
    if config.lora is None:
        return TrainedPolicy(model, config)
    from rollflow.tasks.learners.forward.lora import LoraPolicy

    return LoraPolicy(model, config, first)


class TrainedModels:
    """The models of a learner: policy, critic and reference policy."""

    def __init__(
        self,
        model: Any,
        config: TrainBase,
        *,
        temperature: float,
        versions: int,
        longest: int,
        seed: int,
        shard_bytes: int = SHARD_BYTES,
        first: Callable[[], Mapping[str, Tensor]] = dict,
        blank: bool = False,
    ) -> None:
        """Set up the models; `LearnerStart` documents most arguments. `first` returns the weights with which the run
        began."""
        torch.manual_seed(seed)
        self.device = find_device()
        self.model = model.to(self.device).eval()  # eval mode turns dropout off, but gradients are still computed
        if config.share_prefixes == "all":
            use_path_attention(self.model)  # before the model is copied as critic or reference policy
        self.dtype: torch.dtype = model.dtype  # data type of the model's weights
        self.token_logprobs = TokenLogprobs(self.model, judged=not blank)
        self.config = config
        self.ranks = Ranks()
        self.objective = build_objective(config.objective)
        self.temperature = temperature
        self.versions = versions
        self.longest = longest
        self.shard_bytes = shard_bytes
        self.policy = _trained_policy(self.model, config, first)
        self.sharing: Sharing | None = None  # how rows share tokens; None if they share none
        self.blank = blank
        if not blank:
            self.sharing = find_sharing(self.model, self.token_logprobs, config)
        self._add_roles()

    def try_model(self) -> None:
        """Test whether the model can be trained. A learner that was created without weights (`blank`) calls `try_model`
        after its weights are loaded.

        Raises:
            ConfigError: the model cannot be trained.
        """
        TokenLogprobs(self.model)
        self.sharing, self.blank = find_sharing(self.model, self.token_logprobs, self.config), False

    def _add_roles(self) -> None:
        """Add the reference policy and the critic, if the objective needs them."""
        objective = self.config.objective
        self.penalties = objective.penalties if isinstance(objective, PartsObjective) else Penalties()
        self.kl_weight = self.penalties.kl_weight
        needed = self.penalties.uses_reference or self.objective.uses_reference
        every = self.config.reference.every
        self.reference = self.policy.reference(every, self.token_logprobs) if needed else None
        self.critic = Critic(self.model, self.config) if objective.advantage.baseline == "critic" else None
        if self.config.checkpoint_activations:
            own = self.critic.model.decoder if self.critic else None
            for decoder in filter(None, (self.model.get_decoder(), own)):
                recompute_layers(decoder)

    # --- a version ----------------------------------------------------------------------------------------------

    def learning_rate(self, version: int, base: float | None = None) -> float:
        """Return the learning rate of a policy version; `base` defaults to `train.learning_rate`.

        The learning rate rises linearly to `base` during the warm-up. After the warm-up, the learning rate follows
        `train.schedule`, and is never below a tenth of `base`.
        """
        warm = min(1.0, (version + 1) / max(self.config.warmup_versions, 1))
        return (self.config.learning_rate if base is None else base) * warm * self._decayed_share(version)

    def _decayed_share(self, version: int) -> float:
        """Return the learning rate of a policy version after the warm-up, as a fraction of the highest learning
        rate.
        """
        done = min(1.0, version / self.versions)
        match self.config.schedule:
            case "constant":
                return 1.0
            case "linear":
                return max(1.0 - done, LEAST_SHARE)
            case "cosine":
                return LEAST_SHARE + (1.0 - LEAST_SHARE) * (1.0 + math.cos(math.pi * done)) / 2.0

    def begin(self, version: int, settle: WaitForPublish = no_wait) -> None:
        """Prepare the first update of a policy version.

        `begin` calls `settle` before it changes the tensors of the reference policy, because they are stored with a
        policy version.
        """
        self.policy.begin(self.learning_rate(version))
        if self.reference is not None:
            self.reference.follow(version, settle)
        if self.critic is not None:
            self.critic.begin()
            self.critic.optimized.begin(self.learning_rate(version, self.config.critic.learning_rate))

    def adapt_kl_weight(self, found: Mapping[str, float]) -> Mapping[str, float]:
        """Adapt the weight of the KL penalty for the next policy version; return the current weight as a metric."""
        divergence = found.get(f"kl_{self.penalties.kl_to}")
        if self.penalties.kl_target is None or divergence is None:
            return {}
        told = self.kl_weight
        self.kl_weight = adapt_weight(self.penalties, told, divergence)
        return {"kl_weight": told}

    # --- passes of models ---------------------------------------------------------------------------------------

    def select_rows(self, rows: Sequence[int], signal_R: np.ndarray) -> list[int]:
        """Return the rows of the batch that contribute to the gradient. A row with advantage zero contributes to the
        gradient only if the objective sets `every_row`."""
        return [r for r in rows if self.objective.every_row or signal_R[r]]

    def micros(self, data: BatchRows, rows: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield this rank's share of the rows `rows` as micro-batches."""
        own = partial(self.ranks.select_own, length=attrgetter("length"))
        for micro in micro_batches(data, rows, self.config.micro_tokens, self.sharing, own):
            self.ranks.check()
            yield micro

    @torch.no_grad()
    def compute_tokens(self, data: BatchRows, rows: Sequence[int], of: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Return a value for each of the B tokens with loss mask 1: the result of `of` for tokens of `rows`, and zero
        for tokens of other rows.
        """
        found_B = torch.zeros(len(data.chosen))
        for micro in self.micros(data, rows):
            found_B[micro.among] = of(micro).float().cpu()
        self.ranks.add(found_B)
        return found_B

    def own_logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the policy's log-probs of those tokens of the micro-batch that have loss mask 1."""
        return self._token_logprobs(micro, self.token_logprobs)

    def reference_logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the reference policy's log-probs of those tokens of the micro-batch that have loss mask 1."""
        assert self.reference is not None
        return self._token_logprobs(micro, self.reference.token_logprobs)

    def _token_logprobs(self, micro: MicroBatch, of: Pass) -> Tensor:
        """Return a model's log-probs at the sampling temperature. The model's output head runs only at the positions
        that predict a token with loss mask 1."""
        distinct = micro.find_distinct(slice(None))
        given: tuple[Tensor, ...] = (*micro.where, micro.targets)
        if distinct is not None:  # tokens that several rows share need only one log-prob
            given = tuple(one[distinct[0]] for one in given)
        row, place, targets = (send(one, self.device) for one in given)
        inputs = micro.inputs(self.device, self.dtype)
        found = of(inputs, (row, place), targets, temperature=self.temperature)[0]
        return found if distinct is None else found[send(distinct[1], self.device)]
