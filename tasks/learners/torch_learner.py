"""The torch learner: PPO-style updates of a Hugging Face causal language model.

    batch --> what is known before the first update (`Before`) --> (update of the policy, update of the critic)*

One version is `minibatches` updates, each over its share of the groups. A minibatch's gradient is summed over
micro-batches of padded rows. The loss weights are those of the whole minibatch, so the split changes only the rounding.
Rows of advantage zero have exactly zero gradient and are not run, unless the objective says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.base import Data
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.before import Before, Judged, judge
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.critic import Critic
from rollflow.tasks.learners.diagnostics import Diagnostics
from rollflow.tasks.learners.finite import all_finite, check_batch, check_figures
from rollflow.tasks.learners.optimized import check_fit
from rollflow.tasks.learners.recomputed import recompute_layers
from rollflow.tasks.learners.reference import Reference, named_tensors
from rollflow.tasks.learners.shards import SHARD_BYTES, from_files, to_files
from rollflow.tasks.learners.shared_prompts import shared_width
from rollflow.tasks.learners.token_logprobs import Pass, TokenLogprobs
from rollflow.tasks.learners.trained_policy import TrainedPolicy
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.aggregation import row_weights
from rollflow.tasks.objectives.base import MaskedTokens
from rollflow.tasks.objectives.config import PartsObjective, Penalties
from rollflow.tasks.objectives.packing import MicroBatch, micro_batches
from rollflow.tasks.objectives.penalties import adapted, kl_estimate
from rollflow.tasks.objectives.rows import Rows

WEIGHTS = "weights/model"
STATE, CRITIC, REFERENCE = "learner/state", "learner/critic", "learner/reference"
RNG, KL_WEIGHT = "rng", "kl_weight"  # what the state has beside what the optimizer keeps


def load_model(folder: Path, dtype: str, *, trained: bool) -> Any:
    """A causal language model from a Hugging Face folder: with its weights, or only its architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = getattr(torch, dtype)
    if trained:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=kind)


def _first_weights(start: LearnerStart) -> Mapping[str, Tensor]:
    """By Hugging Face name; none where it is not said which they are."""
    return named_tensors(load_model(start.first(), start.dtype, trained=True)) if start.first else {}


def _trained_policy(model: Any, config: TorchTrain, first: Callable[[], Mapping[str, Tensor]]) -> TrainedPolicy:
    """All of the policy, or an adapter, whose library is loaded only then."""
    if config.lora is None:
        return TrainedPolicy(model, config)
    from rollflow.tasks.learners.lora import LoraPolicy

    return LoraPolicy(model, config, first)


class TorchLearner:
    """`Learner` on one device. See the module's docstring."""

    def __init__(
        self,
        model: Any,
        config: TorchTrain,
        *,
        temperature: float,
        versions: int,
        longest: int,
        seed: int,
        shard_bytes: int = SHARD_BYTES,
        first: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """`first` gives the weights that the run began with, for an adapter; else see `LearnerStart`."""
        torch.manual_seed(seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device).eval()  # gradients come in this mode, too, and dropout does not
        self.token_logprobs = TokenLogprobs(self.model)
        self.config = config
        self.objective = build_objective(config.objective)
        self.temperature = temperature
        self.versions = versions
        self.longest = longest
        self.shard_bytes = shard_bytes
        self.policy = _trained_policy(self.model, config, first)
        self.width = shared_width(self.model, self.token_logprobs) if config.share_prompts else None
        self._add_roles()

    def _add_roles(self) -> None:
        """What the objective needs beside the policy."""
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

    @classmethod
    def begun(cls, config: TorchTrain, start: LearnerStart) -> Self:
        """The learner before its first step."""
        torch.set_num_threads(config.threads)
        torch.manual_seed(start.seed)
        return cls(
            load_model(start.folder, start.dtype, trained=start.trained),
            config,
            temperature=start.temperature,
            versions=start.versions,
            longest=start.longest,
            seed=start.seed,
            shard_bytes=start.shard_bytes,
            first=lambda: _first_weights(start),
        )

    # --- a version ----------------------------------------------------------------------------------------------

    def step(self, batch: TrajectoryBatch, version: int) -> Mapping[str, float]:
        """See `Learner`."""
        data = Rows.of(batch)
        check_batch(data, version)
        self._begin(version)
        before = self._before(data)
        seen = Diagnostics(version)
        metrics = [self._updates(data, before, part, seen) for part in self._minibatches(data)]
        found = {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}
        found |= seen.metrics(entropy=self.objective.uses_entropy)
        found |= {"learning_rate": self.learning_rate(version), "rows_with_signal": float(before.signal_R.mean())}
        return {**found, **self._adapted(found), **before.metrics()}

    def learning_rate(self, version: int, base: float | None = None) -> float:
        """Linear warm-up to `base` (the policy's), then constant or decaying to a tenth at the last version."""
        warm = min(1.0, (version + 1) / max(self.config.warmup_versions, 1))
        left = 1.0 - version / self.versions if self.config.schedule == "linear" else 1.0
        return (self.config.learning_rate if base is None else base) * warm * max(left, 0.1)

    def _begin(self, version: int) -> None:
        self.policy.begin(self.learning_rate(version))
        if self.reference is not None:
            self.reference.follow(version)
        if self.critic is not None:
            self.critic.begin()
            self.critic.optimized.begin(self.learning_rate(version, self.config.critic.learning_rate))

    def _adapted(self, found: Mapping[str, float]) -> Mapping[str, float]:
        """The KL penalty's weight for the next version, where it is adapted."""
        divergence = found.get(f"kl_{self.penalties.kl_to}")
        if self.penalties.kl_target is None or divergence is None:
            return {}
        told = self.kl_weight
        self.kl_weight = adapted(self.penalties, told, divergence)
        return {"kl_weight": told}

    # --- before its first update --------------------------------------------------------------------------------

    def _before(self, data: Rows) -> Before:
        """What is known of the batch; a forward pass over it for each other policy that is asked."""
        every = range(len(data.rewards))
        reference_B = self._pass(data, every, self._reference_logprobs) if self.reference else None
        values_B = self._pass(data, every, self.critic.values) if self.critic else None
        behaviour_B = torch.from_numpy(data.behaviour)
        price_B = self._price(behaviour_B, reference_B)
        part = self.config.objective.advantage
        judged = judge(part, data, self.longest, price_B=price_B, values_B=values_B)
        proximal_B = self._proximal(data, judged)
        whole = proximal_B if self.objective.uses_batch else None
        kept_B = None if whole is None else self.objective.keep(whole, behaviour_B)
        return Before(judged, behaviour_B, proximal_B, kept_B, reference_B, values_B)

    def _price(self, behaviour_B: Tensor, reference_B: Tensor | None) -> Tensor | None:
        """What each token takes from its response's reward."""
        if reference_B is None or self.penalties.kl_in != "reward":
            return None
        return self.kl_weight * kl_estimate(self.penalties, behaviour_B, reference_B)

    def _proximal(self, data: Rows, judged: Judged) -> Tensor | None:
        """(B,) log-probs of the learner, of the rows that are run.

        With one update a version the proximal policy is the one being trained, whose log-probs that update has anyway.
        """
        if self.objective.uses_batch:
            return self._pass(data, range(len(data.rewards)), self._own_logprobs)
        if self.objective.uses_proximal and self.config.minibatches > 1:
            return self._pass(data, self._run(range(len(data.rewards)), judged), self._own_logprobs)
        return None

    @torch.no_grad()
    def _pass(self, data: Rows, rows: Sequence[int], of: Callable[[MicroBatch], Tensor]) -> Tensor:
        """(B,) what `of` gives for the tokens of these rows; zero for others."""
        found_B = torch.zeros(len(data.chosen))
        for micro in self._micros(data, rows):
            found_B[micro.among] = of(micro).float().cpu()
        return found_B

    # --- updates ------------------------------------------------------------------------------------------------

    def _minibatches(self, data: Rows) -> list[list[int]]:
        """Rows of each minibatch: whole groups, dealt out in turn."""
        parts = self.config.minibatches
        return [[r for r, g in enumerate(data.groups) if g % parts == part] for part in range(parts)]

    def _run(self, rows: Sequence[int], judged: Judged) -> list[int]:
        """Those that have a gradient: where the advantage is exactly zero, few objectives do."""
        return [r for r in rows if self.objective.every_row or judged.signal_R[r]]

    def _micros(self, data: Rows, rows: Sequence[int]) -> Iterator[MicroBatch]:
        return micro_batches(data, rows, self.config.micro_tokens, self.width)

    def _updates(self, data: Rows, before: Before, part: list[int], seen: Diagnostics) -> dict[str, float]:
        """One optimizer step over the rows of one minibatch, and one of the critic."""
        found = self._update(data, before, part, seen)
        return found | self._update_critic(data, before, part, seen.version)

    def _update(self, data: Rows, before: Before, part: list[int], seen: Diagnostics) -> dict[str, float]:
        weight_R = torch.zeros(len(data.rewards))
        tokens_R = torch.from_numpy(data.masked_tokens[part])
        weight_R[part] = row_weights(tokens_R, self.config.objective.aggregation, self.longest).float()
        self.policy.clear()
        total = 0.0
        versions_B = torch.from_numpy(data.versions)

        def loss_of(some: slice, hidden_MH: Tensor, micro: MicroBatch) -> Tensor:
            tokens = self._masked_tokens(micro, some, hidden_MH, before)
            result = self.objective.loss(tokens)
            seen.add(tokens, result, versions_B[micro.among[some]].to(self.device))
            return (result.loss_M * weight_R[micro.row_M[some]].to(self.device)).sum()

        for micro in self._micros(data, self._run(part, before.judged)):
            total += self._backward(micro, partial(loss_of, micro=micro))
            self.policy.trained.take_gradients()
        found = {"loss": total, "grad_norm": self.policy.clip()}
        check_figures(found, seen.version)
        self.policy.apply()
        seen.updates += 1
        return found

    def _backward(self, micro: MicroBatch, loss_of: Callable[[slice, Tensor], Tensor]) -> float:
        """Add up the gradient of a micro-batch's loss, and return the loss.

        Of a large vocabulary the head and the loss are run forward and backward for some rows at a time, so that only
        their logits are there at once; then the decoder is run backward for all of them.
        """
        inputs, (row, place) = micro.inputs(self.device, self.model.dtype), micro.where
        hidden_MH = self.token_logprobs.hidden(inputs, (row.to(self.device), place.to(self.device)))
        parts = self.token_logprobs.whole_rows(micro.row_M)
        if len(parts) == 1:
            loss = loss_of(parts[0], hidden_MH)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())
        given, total = hidden_MH.detach(), 0.0
        leaves = [given[some].requires_grad_() for some in parts]
        for some, leaf in zip(parts, leaves, strict=True):
            loss = loss_of(some, leaf)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        hidden_MH.backward(torch.cat([cast(Tensor, leaf.grad) for leaf in leaves]))  # type: ignore[no-untyped-call]
        return total

    def _update_critic(self, data: Rows, before: Before, part: list[int], version: int) -> dict[str, float]:
        if self.critic is None:
            return {}
        assert before.values_B is not None
        assert before.judged.returns_B is not None
        tokens = int(data.masked_tokens[part].sum())
        loss = self.critic.update(self._micros(data, part), before.values_B, before.judged.returns_B, tokens)
        found = {"value_loss": loss, "critic_grad_norm": self.critic.optimized.clip()}
        check_figures(found, version, "train.critic.learning_rate")
        self.critic.optimized.apply()
        return found

    def _masked_tokens(self, micro: MicroBatch, some: slice, hidden_MH: Tensor, before: Before) -> MaskedTokens:
        """What the objective is given of some rows of a micro-batch, from the hidden states before their tokens."""
        among = micro.among[some]
        logp_M, entropy_M = self.token_logprobs.of(
            hidden_MH,
            micro.targets[some].to(self.device),
            temperature=self.temperature,
            entropy=self.objective.uses_entropy,
        )

        def known(found_B: Tensor | None) -> Tensor | None:
            return None if found_B is None else found_B[among].to(self.device)

        proximal_M = known(before.proximal_B) if self.objective.uses_proximal else None
        if self.objective.uses_proximal and proximal_M is None:
            proximal_M = logp_M.detach()
        return MaskedTokens(
            logp_M=logp_M,
            behaviour_M=before.behaviour_B[among].to(self.device),
            advantage_M=before.judged.advantage_B[among].to(self.device),
            row_M=micro.row_M[some].to(self.device),
            proximal_M=proximal_M,
            entropy_M=entropy_M,
            kept_M=known(before.kept_B),
            reference_M=known(before.reference_B),
            kl_weight=self.kl_weight,
        )

    # --- log-probs ----------------------------------------------------------------------------------------------

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """See `Learner`."""
        ids_1T = torch.tensor([list(tokens)], device=self.device)
        before_T = torch.arange(len(tokens) - 1, device=self.device)
        with torch.no_grad(), self.policy.published():
            where = torch.zeros_like(before_T), before_T
            logp_T, _ = self.token_logprobs({"input_ids": ids_1T}, where, ids_1T[0, 1:])
        return tuple(logp_T.tolist())

    def _own_logprobs(self, micro: MicroBatch) -> Tensor:
        return self._token_logprobs(micro, self.token_logprobs)

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        assert self.reference is not None
        return self._token_logprobs(micro, self.reference.token_logprobs)

    def _token_logprobs(self, micro: MicroBatch, of: Pass) -> Tensor:
        """(M,) of the masked tokens at the sampling temperature; the head runs on those positions only."""
        row, place = (index.to(self.device) for index in micro.where)
        inputs, targets_M = micro.inputs(self.device, self.model.dtype), micro.targets.to(self.device)
        return of(inputs, (row, place), targets_M, temperature=self.temperature)[0]

    # --- what is stored -----------------------------------------------------------------------------------------

    def broken(self) -> str | None:
        """See `Learner`."""
        critic = self.critic.tensors() if self.critic else {}
        named = {**self.policy.tensors(), **critic, **self.policy.weights()}
        return next((name for name, tensor in named.items() if not all_finite(tensor)), None)

    def weights(self) -> Mapping[str, Data]:
        """See `Learner`."""
        return to_files(WEIGHTS, self.policy.weights(), self.shard_bytes)

    def state(self) -> Mapping[str, Data]:
        """See `Learner`."""
        own = {RNG: torch.get_rng_state(), **self._weight_of_kl(), **self.policy.tensors()}
        found = to_files(STATE, own, self.shard_bytes)
        for stem, role in self._roles():
            if tensors := role.tensors():
                found |= to_files(stem, tensors, self.shard_bytes)
        return found

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """See `Learner`."""
        loaded, saved = from_files(weights), _of_stem(STATE, state)
        own = {RNG: torch.get_rng_state(), **self._weight_of_kl()}
        check_fit("weights do", loaded, self.policy.weights())
        check_fit("the learner state does", saved, {**own, **self.policy.like(saved)})
        roles = [(role, _of_stem(stem, state)) for stem, role in self._roles()]
        _check_names(state, [STATE, *(stem for stem, _ in self._roles())])
        for role, tensors in roles:
            role.check(tensors)
        drawn = saved.pop(RNG).clone()
        self.kl_weight = float(saved.pop(KL_WEIGHT, self.kl_weight))
        self.policy.take(loaded)
        self.policy.load(saved)
        for role, tensors in roles:
            role.load(tensors)
        torch.set_rng_state(drawn)  # last: to read a model may draw

    def _roles(self) -> list[tuple[str, Critic | Reference]]:
        """What has a state of its own, each with the stem of its files."""
        found = (CRITIC, self.critic), (REFERENCE, self.reference)
        return [(stem, role) for stem, role in found if role is not None]

    def _weight_of_kl(self) -> dict[str, Tensor]:
        """The KL penalty's weight, where it is adapted."""
        adapts = self.penalties.kl_target is not None
        return {KL_WEIGHT: torch.tensor(self.kl_weight, dtype=torch.float64)} if adapts else {}


def _check_names(files: Mapping[str, Data], stems: Sequence[str]) -> None:
    """`Corrupt` if there is a file of something that this learner has not."""
    if strange := [name for name in files if not name.startswith(tuple(stems))]:
        raise Corrupt(f"the learner state does not fit the model: {', '.join(sorted(strange)[:4])}")


def _of_stem(stem: str, files: Mapping[str, Data]) -> dict[str, Tensor]:
    """The tensors of the files that are named after `stem`."""
    return from_files({name: data for name, data in files.items() if name.startswith(stem)})
