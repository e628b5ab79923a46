"""The torch learner trains a Hugging Face causal language model with PPO-style updates.

    batch --> values known before the first update (`PreUpdate`) --> (update of the policy, update of the critic)*

Training a policy version takes `minibatches` updates, each on a share of the batch's groups of responses. Token weights
are computed over the whole minibatch, so splitting it into micro-batches changes only rounding. Rows with advantage
zero have gradient zero and are skipped, unless the objective needs every row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.objects.base import Data
from rollflow.tasks.learners.base import LearnerStart, WaitForPublish, no_wait
from rollflow.tasks.learners.checkpoint.shards import Files, Named, shapes_of, tensors_of, to_files
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.forward.critic import Critic
from rollflow.tasks.learners.forward.models import TrainedModels
from rollflow.tasks.learners.forward.pre_update import compute_before
from rollflow.tasks.learners.forward.reference import Reference, named_tensors
from rollflow.tasks.learners.malloc_trim import release_memory
from rollflow.tasks.learners.optimizer.nonfinite import all_finite, check_batch
from rollflow.tasks.learners.optimizer.trained_tensors import check_fit, check_parts
from rollflow.tasks.learners.randomness import (
    DEVICE_RNG,
    RNG,
    begin_process,
    random_like,
    random_state,
    take_random,
)
from rollflow.tasks.learners.updates import Updates
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.policies.attention import choose_attention

WEIGHTS = "weights/model"
STATE, CRITIC, REFERENCE = "learner/state", "learner/critic", "learner/reference"
KL_WEIGHT = "kl_weight"  # name of the KL penalty's adapted weight in the learner state


def load_model(folder: Path, dtype: str, *, trained: bool, blank: bool = False, attention: str = "exact") -> Any:
    """Load a causal language model from a Hugging Face folder, with or without its weights.

    Without `trained`, the weights are initialized at random. With `blank`, the weights stay uninitialized, so that
    little memory is allocated before they are loaded. `attention` is the value of the option `train.attention`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    kind, config = getattr(torch, dtype), AutoConfig.from_pretrained(folder)
    how = {"dtype": kind, "attn_implementation": choose_attention(config) if attention == "exact" else None}
    if trained and not blank:
        return AutoModelForCausalLM.from_pretrained(folder, config=config, **how)
    with no_init_weights() if blank else nullcontext():
        model = AutoModelForCausalLM.from_config(config, **how)
    model.tie_weights()  # tie weights here, because `no_init_weights` skips the tying
    for pattern, its_kind in model._get_dtype_plan(kind).items():  # from_pretrained does the same
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(pattern, name):
                tensor.data = tensor.data.to(its_kind)
    return model


def _first_weights(start: LearnerStart) -> Mapping[str, Tensor]:
    """Load the weights with which the run began, by Hugging Face name; return no weights if `start.first` is None."""
    return named_tensors(load_model(start.first(), start.dtype, trained=True)) if start.first else {}


class TorchLearner(TrainedModels):
    """A `Learner` on one device."""

    updates: type[Updates] = Updates
    can_shard = sharded = False

    def shard(self) -> None:
        """Shard the learner's weights and state over the ranks; do nothing if this kind of learner cannot be
        sharded."""

    @classmethod
    def create(cls, config: TrainBase, start: LearnerStart) -> Self:
        """Prepare this process, load the model, and create a learner."""
        begin_process(config, start.seed)
        return cls(
            load_model(start.folder, start.dtype, trained=start.trained, blank=start.blank, attention=config.attention),
            config,
            temperature=start.temperature,
            versions=start.versions,
            longest=start.longest,
            seed=start.seed,
            shard_bytes=start.shard_bytes,
            first=lambda: _first_weights(start),
            blank=start.blank,
        )

    # --- a version ----------------------------------------------------------------------------------------------

    def step(self, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> Mapping[str, float]:
        """See `Learner`."""
        judged = batch.judged
        data = BatchRows.of(judged)
        if self.config.objective.observation_weight:
            data = data.with_observed()
        check_batch(data, version)
        self.begin(version, settle)
        before = compute_before(self, data)
        updates = self.updates(self, data, before, version, settle)
        metrics = [updates.take_step(part) for part in self._minibatches(data)]
        found = {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}
        updates.seen.gather(self.ranks)
        found |= updates.seen.metrics(entropy=self.objective.uses_entropy)
        found |= {"learning_rate": self.learning_rate(version), "rows_with_signal": float(before.signal_R.mean())}
        if left_out := batch.episodes - judged.episodes:
            found["left_out_responses"] = float(left_out)
        release_memory(self.model.parameters())
        return {**found, **self.adapt_kl_weight(found), **before.metrics(), **self.ranks.take_metrics()}

    def _minibatches(self, data: BatchRows) -> list[list[int]]:
        """Divide the batch into minibatches; return the rows of each minibatch. All responses to a prompt are in one
        minibatch."""
        parts = self.config.minibatches
        return [[r for r, g in enumerate(data.groups) if g % parts == part] for part in range(parts)]

    # --- log-probs ----------------------------------------------------------------------------------------------

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """See `Learner`."""
        ids_1T = torch.tensor([list(tokens)], device=self.device)
        before_T = torch.arange(len(tokens) - 1, device=self.device)
        with torch.no_grad(), self.policy.use_published():
            where = torch.zeros_like(before_T), before_T
            logp_T, _ = self.token_logprobs({"input_ids": ids_1T}, where, ids_1T[0, 1:])
        return tuple(logp_T.tolist())

    # --- stored files ------------------------------------------------------------------------------------------

    def first_nonfinite(self) -> str | None:
        """See `Learner`."""
        parts = self.policy.tensors(), *(role.tensors() for _, role in self._roles()), self.policy.weights()
        return next((name for part in parts for name, tensor in part.items() if not all_finite(tensor)), None)

    def check_ranks(self) -> None:
        """See `Learner`."""

    def weights(self) -> Mapping[str, Data]:
        """See `Learner`."""
        return to_files(WEIGHTS, self.policy.weights(), self.shard_bytes)

    def state(self) -> Mapping[str, Data]:
        """See `Learner`."""
        own = {**random_state(self.config, self.device), **self._weight_of_kl(), **self.policy.tensors()}
        found = to_files(STATE, own, self.shard_bytes)
        for stem, role in self._roles():
            if tensors := role.tensors():
                found |= to_files(stem, tensors, self.shard_bytes)
        return found

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """See `Learner`."""
        self.check(weights, state)
        self.take(weights.items(), state.items())
        if self.blank:
            self.try_model()

    def check(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Raise `Corrupt` unless this learner can load the weight files `weights` and the state files `state`."""
        saved = shapes_of(_of_stem(STATE, state))
        own = {**random_like(saved), **self._weight_of_kl()}
        check_fit("the weights", shapes_of(weights.items()), self.policy.weights_like())
        check_fit("the learner state", saved, {**own, **self.policy.expected_tensors(saved)})
        check_parts(state, [STATE, *(stem for stem, _ in self._roles())], saved)
        for stem, role in self._roles():
            role.check(shapes_of(_of_stem(stem, state)))

    def take(self, weights: Files, state: Files) -> None:
        """Load files that `check` has accepted, one file after the other.

        Files with the same prefix must follow each other.
        """
        drawn: dict[str, Tensor] = {}
        self.policy.take(tensors_of(weights))
        loads: dict[str, Callable[[Named], None]] = {stem: role.load for stem, role in self._roles()}
        loads[STATE] = lambda saved: self.policy.load(self._take_own_state(saved, drawn))
        stems = tuple(loads)
        for stem, files in groupby(state, lambda file: next(stem for stem in stems if file[0].startswith(stem))):
            loads.pop(stem)(tensors_of(files))
        for load in loads.values():
            load(())
        take_random(drawn, self.device)  # last, because reading a model may draw random numbers

    def _take_own_state(self, saved: Named, drawn: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Restore the weight of the KL penalty from `saved`, and put the states of random generators into `drawn`;
        yield all other tensors.
        """
        for name, tensor in saved:
            if name in (RNG, DEVICE_RNG):
                drawn[name] = tensor.clone()
            elif name == KL_WEIGHT:
                self.kl_weight = float(tensor)
            else:
                yield name, tensor
            del tensor  # free the memory of the file before the next file is read

    def _roles(self) -> list[tuple[str, Critic | Reference]]:
        """Return the models with a state of their own, each with the prefix of its file names."""
        found = (CRITIC, self.critic), (REFERENCE, self.reference)
        return [(stem, role) for stem, role in found if role is not None]

    def _weight_of_kl(self) -> dict[str, Tensor]:
        """Return the adapted weight of the KL penalty as a tensor to store; return nothing if the weight is fixed."""
        adapts = self.penalties.kl_target is not None
        return {KL_WEIGHT: torch.tensor(self.kl_weight, dtype=torch.float64)} if adapts else {}


def _of_stem(stem: str, files: Mapping[str, Data]) -> Files:
    """Return the name and the content of each file whose name begins with the prefix `stem`."""
    return ((name, files[name]) for name in files if name.startswith(stem))
