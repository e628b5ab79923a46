"""A learner on its own episodes: discounted credit of turns teaches an early turn in fewer versions.

An episode has six turns of one token, each followed by a token of the environment. Only the first turn matters: its
reward is 1 if its token is even, else 0. Each later turn has the reward 1 or -1 by chance, whatever its token is.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import StopReason, Trajectory
from rollflow.storage.token_arrays import Float32s, Int64s
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.testing.learners import batch_of, saved
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_learner import learner
from tests.tasks.test_ranks import NEAR, farthest, trained

PROMPT, GROUP, TURNS, MOST, LEARNED = [3, 4, 5], 32, 6, 40, 0.9
CREDITS: dict[str, dict[str, Any]] = {
    "episode": {},
    "episode, rewards at their turns": {},
    "turn, gamma 0.5": {"credit": "turn", "gamma": 0.5},
    "turn, gamma 1": {"credit": "turn"},
    "state, gamma 0.5": {"credit": "state", "gamma": 0.5},
    "state, gamma 1": {"credit": "state"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def play(made: TorchLearner, version: int, draw: torch.Generator, *, whole: bool) -> tuple[TrajectoryBatch, float]:
    """Play a group of episodes; return the batch and the share of even first tokens. With `whole`, an episode has one
    reward, the sum of the rewards of its turns."""
    tokens, logprobs = torch.tensor([PROMPT] * GROUP), list[Tensor]()
    with torch.no_grad():
        for _ in range(TURNS):
            logp = torch.log_softmax(made.model(input_ids=tokens).logits[:, -1].float(), -1)
            drawn = torch.multinomial(logp.exp(), 1, generator=draw)
            logprobs.append(logp.gather(1, drawn))
            tokens = torch.cat([tokens, drawn, torch.full_like(drawn, 7)], 1)
    even = tokens[:, len(PROMPT)] % 2 == 0
    noise = torch.randint(0, 2, (GROUP, TURNS - 1), generator=draw) * 2.0 - 1
    rewards, own = torch.cat([even[:, None].float(), noise], 1), torch.cat(logprobs, 1)
    starts = [len(PROMPT) + 2 * turn for turn in range(TURNS)]
    rows = []
    for number, row in enumerate(tokens.tolist()):
        mask, logged, given = [False] * len(row), [0.0] * len(row), [math.nan] * len(row)
        for turn, at in enumerate(starts):
            mask[at], logged[at], given[at] = True, float(own[number, turn]), float(rewards[number, turn])
        score, versions = float(rewards[number].sum()) if whole else 0.0, [version if one else -1 for one in mask]
        one = Trajectory(
            number,
            version,
            row,
            mask,
            logged,
            versions,
            score,
            "",
            StopReason.STOP,
            turn_starts=starts,
            turn_states=Int64s.of(range(1, TURNS + 1)),
            token_rewards=None if whole else Float32s.of(given),
        )
        rows.append(one)
    return batch_of(rows), float(even.float().mean())


def versions_to_learn(folder: Path, credit: str, seed: int) -> int:
    """Return the number of versions after which the first token is even in nine of ten episodes."""
    objective = {"kind": "dr-grpo", "aggregation": "token-mean", "advantage": CREDITS[credit]}
    made, draw = learner(folder, learning_rate=2e-3, objective=objective), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    for version in range(MOST):
        batch, share = play(made, version, draw, whole=credit == "episode")
        if share >= LEARNED:
            return version
        made.step(batch, version)
    return MOST


def test_policy_learns_faster_with_discounted_turn_credit(folder: Path) -> None:
    """The discount makes the difference: with gamma = 1, the first turn gets the noise of all later turns."""
    whole, found = (
        [versions_to_learn(folder, one, seed) for seed in range(3)] for one in ("episode", "turn, gamma 0.5")
    )
    assert sum(found) < sum(whole)
    assert max(found) < MOST


def test_turn_credit_does_not_depend_on_the_rank_count(folder: Path) -> None:
    """Advantages are those of the whole batch, and micro-batches and ranks change only rounding."""

    def batches(seed: int) -> TrajectoryBatch:
        return play(learner(folder), seed, torch.Generator().manual_seed(seed), whole=False)[0]

    played = [batches(version) for version in range(10)]
    objective = PartsObjective.model_validate({"kind": "gigpo"})
    [(expected, weights)] = trained(folder, TorchTrain(objective=objective), 1, played.__getitem__)
    first, other = trained(folder, TorchTrain(objective=objective, micro_tokens=40), 2, played.__getitem__)
    for told, one in zip(first[0], expected, strict=True):
        told.pop("rank_imbalance")
        assert told == pytest.approx(one, abs=NEAR, rel=1e-4)
    assert farthest(first[1], weights) < NEAR
    assert farthest(first[1], other[1]) == 0


def test_turn_credit_is_replayed_bit_for_bit(folder: Path) -> None:
    found = []
    for _ in range(2):
        made, draw = learner(folder, micro_tokens=40, objective={"kind": "gigpo"}), torch.Generator().manual_seed(0)
        made.step(TrajectoryBatch.from_bytes(play(made, 0, draw, whole=False)[0].to_bytes()), 0)
        found.append(saved(made)[0])
    assert found[0] == found[1]


def test_learner_refuses_credit_by_state_without_state_names(folder: Path) -> None:
    made = learner(folder, objective={"kind": "gigpo"})
    batch = play(made, 0, torch.Generator().manual_seed(0), whole=True)[0]
    bare = batch_of(
        [
            Trajectory(0, 0, row.tokens, row.loss_mask, row.logprobs, row.versions, 0.0, "", row.ending)
            for row in batch.groups()[0].trajectories[:1]
        ]
    )
    with pytest.raises(ConfigError, match='credit = "state" needs an environment that names the state of each turn'):
        made.step(bare, 0)


def main() -> None:
    """Print the number of versions that each kind of credit needs, for eight seeds."""
    with TemporaryDirectory() as place:
        folder = make_weights(make_policy(Path(place)), seed=1)
        for credit in CREDITS:
            found = [versions_to_learn(folder, credit, seed) for seed in range(8)]
            print(f"{credit}: {found}, mean {fmean(found):g}")


if __name__ == "__main__":
    main()
