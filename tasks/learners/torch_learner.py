"""The torch learner: PPO-style updates of a Hugging Face causal language model.

One version is `minibatches` optimizer steps, each over its share of the groups. A minibatch's gradient is
summed over micro-batches of padded rows. The loss weights are those of the whole minibatch, so the split changes
only the rounding. Rows of advantage zero have exactly zero gradient and are not run, unless the objective says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, NotFinite
from rollflow.storage.objects.base import Data
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.diagnostics import Diagnostics
from rollflow.tasks.learners.masters import Trained
from rollflow.tasks.learners.shards import SHARD_BYTES, from_files, to_files
from rollflow.tasks.learners.token_logprobs import TokenLogprobs
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.advantages import advantages
from rollflow.tasks.objectives.aggregation import row_weights
from rollflow.tasks.objectives.base import MaskedTokens
from rollflow.tasks.objectives.packing import MicroBatch, Rows, micro_batches

WEIGHTS = "weights/model"
STATE = "learner/state"
MASTER = "master"  # what the state has of a parameter with a master
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter that it has changed


def load_model(folder: Path, dtype: str, *, trained: bool) -> Any:
    """A causal language model from a Hugging Face folder: with its weights, or only its architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = getattr(torch, dtype)
    if trained:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=kind)


@dataclass(frozen=True, slots=True)
class Before:
    """What the learner says of a batch's rows before its first update of a version: each (M,) by row."""

    proximal: dict[int, Tensor]  # log-probs
    kept: dict[int, Tensor] | None  # which tokens count, where the objective looks at the whole batch


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
    ) -> None:
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
        self.trained = Trained(self.model, wide=config.master_dtype == "float32")
        self.optimizer = torch.optim.AdamW(
            self.trained.parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )

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
        )

    def step(self, batch: TrajectoryBatch, version: int) -> Mapping[str, float]:
        """See `Learner`."""
        data = Rows.of(batch)
        _check_batch(data, version)
        self.trained.follow()
        advantages_R = self._advantages(data)
        before = self._before(data, advantages_R)
        rate = self.learning_rate(version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        seen = Diagnostics(version)
        metrics = [self._update(data, advantages_R, before, part, seen) for part in self._minibatches(data)]
        found = {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}
        used = data.rewards[advantages_R.numpy() != 0]
        found |= seen.metrics(entropy=self.objective.uses_entropy)
        return {**found, "learning_rate": rate, "rows_with_signal": len(used) / len(data.rewards)}

    def learning_rate(self, version: int) -> float:
        """Linear warm-up, then constant or decaying to a tenth at the last version."""
        warm = min(1.0, (version + 1) / max(self.config.warmup_versions, 1))
        left = 1.0 - version / self.versions if self.config.schedule == "linear" else 1.0
        return self.config.learning_rate * warm * max(left, 0.1)

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """See `Learner`."""
        ids_1T = torch.tensor([list(tokens)], device=self.device)
        before_T = torch.arange(len(tokens) - 1, device=self.device)
        with torch.no_grad():
            logp_T, _ = self.token_logprobs(ids_1T, (torch.zeros_like(before_T), before_T), ids_1T[0, 1:])
        return tuple(logp_T.tolist())

    def broken(self) -> str | None:
        """See `Learner`."""
        named = {**self._named(), **self._optimized()}
        return next((name for name, tensor in named.items() if not _finite(tensor)), None)

    def weights(self) -> Mapping[str, Data]:
        """See `Learner`."""
        return to_files(WEIGHTS, self._named(), self.shard_bytes)

    def state(self) -> Mapping[str, Data]:
        """See `Learner`."""
        return to_files(STATE, {"rng": torch.get_rng_state(), **self._optimized()}, self.shard_bytes)

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """See `Learner`."""
        named, loaded, saved = self._named(), from_files(weights), from_files(state)
        _check_fit("weights do", loaded, named)
        _check_fit("the learner state does", saved, self._like(saved))
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(loaded[name])
        self.trained.begin()
        torch.set_rng_state(saved.pop("rng").clone())
        self.optimizer.state.clear()
        for name, value in saved.items():
            key, _, parameter = name.partition("/")
            trained = self.trained.parameters[parameter]
            if key == MASTER:
                trained.detach().copy_(value)
                continue
            device = "cpu" if key == "step" else self.device
            self.optimizer.state[trained][key] = value.to(device, copy=True)

    def _like(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state of the parameters that `saved` has something of: each tensor's shape and type, not its values."""
        trained = {name.partition("/")[2] for name in saved}
        one = torch.zeros(())
        return {"rng": torch.get_rng_state()} | {
            f"{key}/{name}": one if key == "step" else parameter
            for name, parameter in self.trained.parameters.items()
            for key in (*MOMENTS, *([MASTER] if self.trained.wide else []))
            if name in trained
        }

    def _named(self) -> dict[str, Tensor]:
        """Tensors by Hugging Face name; a tensor tied to another is named once."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or self.model._tied_weights_keys or ())
        keep = {} if not self.model.config.tie_word_embeddings else tied
        return {n: t.detach().contiguous() for n, t in self.model.state_dict().items() if n not in keep}

    def _optimized(self) -> dict[str, Tensor]:
        """The optimizer's tensors, as "exp_avg/<parameter>", and the masters of the parameters that it has changed."""
        return {
            f"{key}/{name}": torch.as_tensor(value).detach()
            for name, parameter in self.trained.parameters.items()
            if (kept := self.optimizer.state.get(parameter))
            for key, value in {**kept, **({MASTER: parameter} if self.trained.wide else {})}.items()
        }

    def _advantages(self, data: Rows) -> Tensor:
        rewards_R, groups_R = torch.tensor(data.rewards), torch.tensor(data.groups)
        tokens_R = torch.from_numpy(data.masked_tokens)
        return advantages(self.config.objective.advantage, rewards_R, groups_R, tokens_R, self.longest)

    def _minibatches(self, data: Rows) -> list[list[int]]:
        """Rows of each minibatch: whole groups, dealt out in turn."""
        parts = self.config.minibatches
        return [[r for r, g in enumerate(data.groups) if g % parts == part] for part in range(parts)]

    def _before(self, data: Rows, advantages_R: Tensor) -> Before | None:
        """A pass over the batch before this version's first update, where the objective needs one.

        With one update a version the proximal policy is the one being trained, whose log-probs that update has anyway.
        """
        objective = self.objective
        if not objective.uses_batch and not (objective.uses_proximal and self.config.minibatches > 1):
            return None
        found: dict[int, Tensor] = {}
        given: dict[int, Tensor] = {}
        rows = range(len(data.rewards))
        with torch.no_grad():
            micros = micro_batches(data, rows, self.config.micro_tokens) if objective.uses_batch else None
            for micro in micros or self._micros(data, rows, advantages_R):
                logp_M, behaviour_M = self._token_logprobs(micro)[0], micro.behaviour.to(self.device)
                for i, row in enumerate(micro.rows.tolist()):
                    where_M = micro.where[0] == i
                    found[row], given[row] = logp_M[where_M], behaviour_M[where_M]
        return Before(found, self._kept(found, given) if objective.uses_batch else None)

    def _kept(self, proximal: dict[int, Tensor], behaviour: dict[int, Tensor]) -> dict[int, Tensor]:
        """What the objective keeps of each row's tokens, of the whole batch."""
        kept_B = self.objective.keep(torch.cat(list(proximal.values())), torch.cat(list(behaviour.values())))
        ends = np.cumsum([len(part) for part in proximal.values()])
        return {row: kept_B[end - len(part) : end] for (row, part), end in zip(proximal.items(), ends, strict=True)}

    def _micros(self, data: Rows, rows: Sequence[int], advantages_R: Tensor) -> Iterator[MicroBatch]:
        """Micro-batches of the rows that have a gradient: where the advantage is exactly zero, few objectives do."""
        run = [r for r in rows if self.objective.every_row or float(advantages_R[r]) != 0.0]
        return micro_batches(data, run, self.config.micro_tokens)

    def _update(
        self, data: Rows, advantages_R: Tensor, before: Before | None, part: list[int], seen: Diagnostics
    ) -> dict[str, float]:
        """One optimizer step over the rows of one minibatch."""
        weight_R = torch.zeros(len(data.rewards))
        tokens_R = torch.from_numpy(data.masked_tokens[part])
        weight_R[part] = row_weights(tokens_R, self.config.objective.aggregation, self.longest).float()
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro in self._micros(data, part, advantages_R):
            rows_M = micro.rows[micro.where[0]]
            tokens = self._masked_tokens(micro, advantages_R[rows_M].to(self.device), before)
            result = self.objective.loss(tokens)
            loss = (result.loss_M * weight_R[rows_M].to(self.device)).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            self.trained.take_gradients()
            total += float(loss.detach())
            seen.add(tokens, result, micro.versions.to(self.device))
        norm = torch.nn.utils.clip_grad_norm_(self.trained.parameters.values(), self.config.max_grad_norm)
        found = {"loss": total, "grad_norm": float(norm)}
        _check_figures(found, seen.version)
        self.optimizer.step()
        self.trained.publish()
        seen.updates += 1
        return found

    def _masked_tokens(self, micro: MicroBatch, advantage_M: Tensor, before: Before | None) -> MaskedTokens:
        """What the objective is given of a micro-batch."""
        logp_M, entropy_M = self._token_logprobs(micro)
        proximal_M, rows = None, micro.rows.tolist()
        if self.objective.uses_proximal:
            proximal_M = _joined(before.proximal, rows) if before else logp_M.detach()
        return MaskedTokens(
            logp_M=logp_M,
            behaviour_M=micro.behaviour.to(self.device),
            advantage_M=advantage_M,
            row_M=micro.where[0].to(self.device),
            proximal_M=proximal_M,
            entropy_M=entropy_M,
            kept_M=_joined(before.kept, rows) if before and before.kept else None,
        )

    def _token_logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Log-probs (M,) of the masked tokens at the sampling temperature; the head runs on those positions only.

        Where the objective wants it, the entropy (M,) of what they were chosen from, too.
        """
        row, position = (index.to(self.device) for index in micro.where)
        return self.token_logprobs(
            micro.tokens.to(self.device),
            (row, position),
            micro.targets.to(self.device),
            temperature=self.temperature,
            entropy=self.objective.uses_entropy,
        )


def _joined(rows: Mapping[int, Tensor], order: Sequence[int]) -> Tensor:
    """(M,) the tokens of some rows, one row after the other."""
    return torch.cat([rows[row] for row in order])


def _check_batch(data: Rows, version: int) -> None:
    """`NotFinite` if what is trained on is not: an objective may bound it to something that looks sound."""
    made_by = {"a log-prob": (data.behaviour[data.mask], "engine"), "a reward": (data.rewards, "verifier")}
    for name, (values, maker) in made_by.items():
        wrong = values[~np.isfinite(values)]
        if len(wrong):
            raise NotFinite(
                f"version {version + 1} is not trained: {name} of batch {version} is {wrong[0]}; "
                f"mend the {maker}, and begin another run with what `rollflow export` gives"
            )


def _check_figures(figures: Mapping[str, float], version: int) -> None:
    """`NotFinite` if a figure of an update is not; asked before the optimizer takes its gradient."""
    for name, value in figures.items():
        if not np.isfinite(value):
            raise NotFinite(
                f"version {version + 1} is not trained: {name} of batch {version} is {value}; lower train.learning_rate"
            )


def _check_fit(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """`Corrupt` if they are not the same tensors by name, shape and type."""
    found, wanted = ({(n, t.shape, t.dtype) for n, t in tensors.items()} for tensors in (given, own))
    if differing := sorted({name for name, *_ in found ^ wanted}):
        raise Corrupt(f"{what} not fit the model: {', '.join(differing[:4])}")


def _finite(tensor: Tensor) -> bool:
    """Whether no element is a NaN or an infinity, in one pass without a copy."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
