"""A learner that trains like `TorchLearner`, but shards weights, gradients and AdamW moments over its ranks.

    torch learner, whole or blank --shard--> backends --take--> step, load, weights, state: of all ranks

- All ranks run the same number of passes, because ranks exchange shards in each pass. For each micro-batch that a rank
  has fewer than other ranks, the rank runs an extra row, whose loss is multiplied by zero.
- The model is sharded before the first train step or load, so that a cold start (supervised training) can train the
  whole model.
- Stored files are the same as those of `TorchLearner`, so they do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollflow.storage.objects.base import Data
from rollflow.tasks.learners.checkpoint.sharded_files import GatheredFiles
from rollflow.tasks.learners.checkpoint.shards import Files, Named, file_of, index_of, plan_files
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.forward.critic import WEIGHT, Critic, drop_weights, value_loss
from rollflow.tasks.learners.forward.observations import ObservationLoss
from rollflow.tasks.learners.forward.reference import named_tensors
from rollflow.tasks.learners.forward.trained_policy import TrainedPolicy
from rollflow.tasks.learners.malloc_trim import release_memory
from rollflow.tasks.learners.optimizer.nonfinite import all_finite, check_figures
from rollflow.tasks.learners.optimizer.trained_tensors import check_fit
from rollflow.tasks.learners.randomness import random_state
from rollflow.tasks.learners.sharding.backend import ShardingBackend
from rollflow.tasks.learners.torch_learner import CRITIC, REFERENCE, STATE, WEIGHTS, TorchLearner
from rollflow.tasks.learners.updates import Updates
from rollflow.tasks.objectives.packing import MicroBatch, micro_batches
from rollflow.tasks.objectives.rows import BatchRows

Stored = dict[str, dict[str, dict[str, Tensor]]]  # file name prefix -> file name -> tensor name -> tensor


class ShardedPolicy(TrainedPolicy, ShardingBackend):
    """A policy whose parameters are sharded over ranks; a subclass also derives from a sharding backend."""

    def __init__(self, model: Any, config: TrainBase, ranks: GlooRanks) -> None:
        self.model = model
        given = dict(model.named_parameters())
        self.rest = {name: tensor for name, tensor in named_tensors(model).items() if name not in given}
        super(TrainedPolicy, self).__init__(model, config, ranks)  # the backend's constructor

    def gather_everywhere(self) -> dict[str, Tensor]:
        """See `ShardingBackend`; return all published weights, including those that are not trained."""
        return {**super().gather_everywhere(), **self.rest}

    def weights(self) -> dict[str, Tensor]:
        """See `TrainedPolicy`. Sharded weights are returned without values; `gather_weight` gathers the values."""
        return self.weights_like()

    def weights_like(self) -> dict[str, Tensor]:
        """See `TrainedPolicy`."""
        return {**self.parameters_like(), **self.rest}

    @torch.no_grad()
    def take(self, weights: Named) -> None:
        """See `TrainedPolicy`."""
        for name, tensor in weights:
            if name in self.rest:
                self.rest[name].copy_(tensor)
            else:
                self.put(name, tensor)
            del tensor  # free the file's memory before the next file is read


class ShardedCritic(Critic):
    """A critic whose parameters are sharded over ranks by a sharding backend of its own."""

    optimized: ShardingBackend

    def shard(self, policy: ShardedPolicy, engine: ShardingBackend) -> None:
        """Shard the parameters of the critic with `engine`. After this call, `begin` gathers the policy's weights from
        the shards of all ranks, and copies the decoder's weights into the critic.
        """
        self._policy_weights = policy.gather_everywhere
        self._decoder = next(n for n, found in policy.model.named_modules() if found is policy.model.get_decoder())
        self.optimized = engine

    def begin(self) -> None:
        """See `Critic`."""
        if not self.begun:
            own = {f"decoder{name.removeprefix(self._decoder)}": t for name, t in self._policy_weights().items()}
            shapes = self.optimized.shapes
            for name, shape in shapes.items():
                self.optimized.put(name, torch.zeros(shape) if name.startswith("head.") else own[name])
            self.optimized.load(())
            self.begun = True

    def values(self, micro: MicroBatch) -> Tensor:
        """See `Critic`."""
        if torch.is_grad_enabled():
            return super().values(micro)  # the caller already runs inside a pass of the sharding backend
        return self.optimized.run(lambda: Critic.values(self, micro))

    def loss(self, micro: MicroBatch, values_B: Tensor, returns_B: Tensor, share: float) -> Tensor:
        """Return the sum of `value_loss` over the tokens of a micro-batch, multiplied by `share`."""
        found_M = self.values(micro)
        old_M, return_M = (known_B[micro.among].to(found_M) for known_B in (values_B, returns_B))
        return value_loss(found_M, old_M, return_M, self._config.value_clip).sum() * share

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """See `Critic`."""
        if saved:
            own = {f"{WEIGHT}{name}": tensor for name, tensor in self.optimized.parameters_like().items()}
            check_fit("the critic's state", saved, {**own, **self.optimized.expected_tensors(drop_weights(saved))})

    def _take(self, name: str, weight: Tensor) -> None:
        self.optimized.put(name, weight)

    def gather_tensor(self, saved: str, to: int) -> Tensor:
        """Gather one of the critic's saved tensors on rank `to`."""
        of = self.optimized
        if saved.startswith(WEIGHT):
            return of.gather_weight(saved.removeprefix(WEIGHT), to)
        return of.gather_tensor(saved, to)

    def _weights(self) -> dict[str, Tensor]:
        return {f"{WEIGHT}{name}": tensor for name, tensor in self.optimized.parameters_like().items()}


class ShardedLearner(TorchLearner):
    """A learner whose models are sharded over ranks; a subclass chooses the sharding backend."""

    engine: type[ShardingBackend]
    engine_of_policy: type[ShardedPolicy]
    policy: ShardedPolicy
    critic: ShardedCritic | None
    ranks: GlooRanks
    can_shard = True

    def begin_group(self) -> None:
        """Create the process group of the sharding backends; an earlier group is destroyed, because a process can have
        only one."""
        raise NotImplementedError

    def shard(self) -> None:
        """Shard the policy and the critic over the ranks; the caller must call `take` next.

        All ranks must call `shard` at the same time.
        """
        critic = ShardedCritic(self.model, self.config) if self.critic is not None else None
        self.begin_group()
        self.ranks.open_beside()
        self.policy = self.engine_of_policy(self.model, self.config, self.ranks)
        if critic is not None:
            critic.shard(self.policy, self.engine(critic.model, self.config, self.ranks))
        if self.reference is not None:
            self.reference.now = self.policy.gather_everywhere
        self.critic, self.updates, self.sharded = critic, ShardedUpdates, True

    def take(self, weights: Files, state: Files) -> None:
        """See `TorchLearner`."""
        super().take(weights, state)
        release_memory(self.model.parameters())

    @torch.no_grad()
    def try_model(self) -> None:
        """See `TrainedModels`."""

        def tried() -> Tensor:
            TorchLearner.try_model(self)
            return torch.zeros(())

        if self.sharded:
            self.policy.run(tried)
        else:
            super().try_model()

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """See `Learner`."""
        if not self.sharded:
            return super().logprobs(tokens)
        found = self.policy.run(lambda: torch.tensor(TorchLearner.logprobs(self, tokens), dtype=torch.float64))
        release_memory(self.model.parameters())  # free the gathered weights before the policy version is published
        return tuple(found.tolist())

    def first_nonfinite(self) -> str | None:
        """See `Learner`; each rank checks its own shards."""
        if not self.sharded:
            return super().first_nonfinite()
        critic = self.critic.optimized.check_finite(WEIGHT) if self.critic and self.critic.begun else {}
        whole = self.reference.tensors() if self.reference else {}
        reference = {name: all_finite(tensor) for name, tensor in whole.items()}
        found = [*self.policy.check_finite().items(), *critic.items(), *reference.items()]
        wrong = torch.tensor([not finite for _, finite in found], dtype=torch.float32)
        self.ranks.add(wrong)
        return next((name for (name, _), ranks in zip(found, wrong.tolist(), strict=True) if ranks), None)

    def weights(self) -> Mapping[str, Data]:
        """See `Learner`; a file of a sharded learner is gathered when the file is read."""
        return self._files([WEIGHTS]) if self.sharded else super().weights()

    def state(self) -> Mapping[str, Data]:
        """See `Learner`; a file of a sharded learner is gathered when the file is read."""
        return self._files([STATE, CRITIC, REFERENCE]) if self.sharded else super().state()

    def gather(self, file: str, to: int) -> Data:
        """Gather a weight or state file on rank `to`."""
        return self._file(self._list_stored(), to, file)

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        """Return for each weight and state file its size in bytes, and False if only the first rank can store it."""
        return {
            file: (sum(like.nbytes for like in shard.values()), stem != STATE or all(map(_is_sharded, shard.values())))
            for stem, shards in self._list_stored().items()
            for file, shard in (*shards.items(), *((index, {}) for index in index_of(stem, shards)))
        }

    def _files(self, stems: Sequence[str]) -> Mapping[str, Data]:
        stored = {stem: shards for stem, shards in self._list_stored().items() if stem in stems}
        names = [name for stem, shards in stored.items() for name in (*shards, *index_of(stem, shards))]
        return GatheredFiles(names, partial(self._file, stored, 0))

    def _file(self, stored: Stored, to: int, file: str) -> Data:
        for stem, shards in stored.items():
            if file in shards:
                return file_of({name: self._tensor(stem, name, like, to) for name, like in shards[file].items()})
            if file in (index := index_of(stem, shards)):
                return index[file]
        raise KeyError(file)

    def _list_stored(self) -> Stored:
        """Return the tensors that are stored for a policy version, by file name prefix and file. Sharded tensors are on
        torch's "meta" device, without values."""
        own = {**random_state(self.config, self.device), **self._weight_of_kl(), **self.policy.tensors()}
        roles = {stem: tensors for stem, role in self._roles() if (tensors := role.tensors())}
        stored = {WEIGHTS: self.policy.weights(), STATE: own, **roles}
        return {stem: plan_files(stem, tensors, self.shard_bytes) for stem, tensors in stored.items()}

    def _tensor(self, stem: str, name: str, like: Tensor, to: int) -> Tensor:
        if not _is_sharded(like):
            return like
        if stem == WEIGHTS:
            return self.policy.gather_weight(name, to)
        if self.critic and stem == CRITIC:
            return self.critic.gather_tensor(name, to)
        return self.policy.gather_tensor(name, to)

    def own_logprobs(self, micro: MicroBatch) -> Tensor:
        """See `TrainedModels`."""
        return self.policy.run(lambda: TorchLearner.own_logprobs(self, micro))

    @torch.no_grad()
    def compute_tokens(self, data: BatchRows, rows: Sequence[int], of: Callable[[MicroBatch], Tensor]) -> Tensor:
        """See `TrainedModels`."""
        found_B = torch.zeros(len(data.chosen))
        for micro, counts in self.pad_passes(data, rows):
            said = of(micro)
            if counts:
                found_B[micro.among] = said.float().cpu()
        self.ranks.add(found_B)
        return found_B

    def pad_passes(self, data: BatchRows, rows: Sequence[int]) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield the same number of micro-batches on each rank; the flag is False for an extra micro-batch, whose
        results are not used.
        """
        own = list(self.micros(data, rows))
        counts = torch.zeros(self.ranks.count)
        counts[self.ranks.rank] = len(own)
        self.ranks.add(counts)
        passes = int(counts.max())
        for number in range(passes):
            micro = own[number] if number < len(own) else self._shortest_row(data)
            yield micro, number < len(own)

    def _shortest_row(self, data: BatchRows) -> MicroBatch:
        """Return a micro-batch of one row, the row with the fewest (but at least one) tokens with loss mask 1."""
        row = min(
            range(len(data.rewards)), key=lambda row: (data.masked_tokens[row] == 0, data.masked_tokens[row], row)
        )
        return next(micro_batches(data, [row], self.config.micro_tokens))


class ShardedUpdates(Updates):
    """The updates of a sharded learner, with one forward and one backward pass of the whole model per micro-batch.

    Logits of more than one chunk are recomputed in the backward pass.
    """

    roles: ShardedLearner

    def _update(self, part: list[int]) -> dict[str, float]:
        roles, policy = self.roles, self.roles.policy
        weight_R, observation = self.weights_of(part), self.observe(part)
        policy.clear()
        micros = roles.pad_passes(self.data, self.select_rows(part))
        losses = policy.run_backward(
            partial(self._pass, micro, weight_R, observation, counts) for micro, counts in micros
        )
        total = torch.tensor(sum(losses), dtype=torch.float64)
        roles.ranks.add(total)
        figures = {"loss": float(total), "grad_norm": policy.clip()}
        if observation is not None:
            figures |= observation.sum_ranks(roles.ranks)
        check_figures(figures, self.seen.version)
        self.settle()
        policy.apply()
        self.seen.updates += 1
        return figures

    def _pass(self, micro: MicroBatch, weight_R: Tensor, observation: ObservationLoss | None, counts: bool) -> Tensor:
        """Return the loss of a micro-batch; if `counts` is False, loss and gradient are zero."""
        [kept] = self.drop_idle([micro]) if counts else [micro]
        inputs = micro.inputs(self.device, self.roles.dtype)
        if not counts:
            hidden_MH = self.token_logprobs.hidden(inputs, micro.where)
            return self.token_logprobs.of(hidden_MH, micro.targets.to(self.device))[0].sum() * 0.0
        hidden_NH = self.token_logprobs.hidden(inputs, kept.predicting)
        if observation is None or kept.observed is None or not len(kept.observed.targets):
            return self.compute_loss(slice(None), hidden_NH, kept, weight_R)
        behind = len(kept.targets)
        loss = observation.compute(slice(None), hidden_NH[behind:], kept.observed)
        return loss + self.compute_loss(slice(None), hidden_NH[:behind], kept, weight_R) if behind else loss

    def _update_critic(self, part: list[int]) -> dict[str, float]:
        roles, critic, before = self.roles, self.roles.critic, self.before
        if critic is None:
            return {}
        assert before.values_B is not None
        assert before.judged.returns_B is not None
        tokens = max(int(self.data.masked_tokens[part].sum()), 1)
        critic.optimized.clear()
        of = partial(critic.loss, values_B=before.values_B, returns_B=before.judged.returns_B)
        passes = (partial(of, micro, share=counts / tokens) for micro, counts in roles.pad_passes(self.data, part))
        total = torch.tensor(sum(critic.optimized.run_backward(passes)), dtype=torch.float64)
        roles.ranks.add(total)
        figures = {"value_loss": float(total), "critic_grad_norm": critic.optimized.clip()}
        check_figures(figures, self.seen.version, "train.critic.learning_rate")
        critic.optimized.apply()
        return figures


def _is_sharded(stored: Tensor) -> bool:
    """Return True if a stored tensor is sharded instead of copied to each rank."""
    return stored.device.type == "meta"
