"""Tests of several environments in one run. A prompt's row names its environment; a broken environment is removed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason, Outcome, Prompt, StopReason
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments import build_environment, close_environment, read_counts
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.config import MixedEnvironment
from rollflow.tasks.environments.limits import NO_LIMITS
from rollflow.tasks.environments.mixed import MixedEpisodes
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.environments.use_counts import UsedEnvironments
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.evaluation import DomainResult, Evaluation, Evaluator
from rollflow.tasks.rollout.issue_order import MOST_REMOVED
from rollflow.tasks.rollout.proxy import InferenceProxy, VersionedGeneration, WeightsProbe
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.testing.environments import CodePoints, build_ports
from tests.environments.worlds import PROMPT, call, gym, speak, trl
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline, prompt_at

BAD = trl("Bad", options={"wrong": "error", "where": "init"}, max_failures=2)
GOOD = trl("Quiet")


def mix(default: str | None = None, **kinds: Any) -> MixedEnvironment:
    return MixedEnvironment(column="world", default=default, kinds=kinds)


def play(config: MixedEnvironment, row: Mapping[str, Any], *said: str) -> tuple[Score | None, PlayedEpisode]:
    """Play an episode of the class `PlayedEpisode`; the policy repeats its last response."""
    tokenizer = CodePoints()

    async def ask(turn: Turn) -> VersionedGeneration:
        tokens = tokenizer.encode_response(said[min(turn.number, len(said) - 1)])[: turn.max_new_tokens]
        span = TokenSpan.of(tokens, [-1.0] * len(tokens), [0] * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(_: ScoreRequest) -> Score:
        return Score(0.25)

    async def run() -> tuple[Score | None, PlayedEpisode]:
        environment = build_environment(config)
        episode = PlayedEpisode(replace(PROMPT, reference=row), 10_000, ask, keep, score, ports=build_ports(config))
        try:
            return await episode.play(environment), episode
        finally:
            await close_environment(environment)

    return asyncio.run(run())


def test_row_names_the_environment_and_its_limits() -> None:
    config = mix(default="count", count=trl("Counter"), walk=gym(max_turns=2))
    score, episode = play(config, {"world": "count", "answer": "3"}, call("add", number=3), "Done.")
    assert score is not None
    assert (score.value, episode.turns) == (1.0, 2)
    assert play(config, {"answer": "4"}, call("add", number=4), "Done.")[0] == Score(1.0)
    score, episode = play(config, {"world": "walk"}, "1")
    assert score is not None
    assert (score.value, episode.turns) == (3.0, 2)
    assert "max_turns = 2" in score.reason


@pytest.mark.parametrize(("row", "shown"), [({"world": "fly"}, "'fly'"), ({"world": 3}, "3"), ({}, "None")])
def test_row_that_names_no_environment_is_refused(row: Mapping[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment.column = 'world'.*has {shown} there.*name one of: count"):
        play(mix(count=trl("Counter")), row, "Done.")


@dataclass
class MixedRun(Pipeline):
    """A run whose prompts name their environments in turn."""

    names: tuple[str, ...] = ("good", "bad")

    def _prompt(self, index: int) -> Prompt:
        return replace(super()._prompt(index), reference={"world": self.names[index % len(self.names)]})


def run_mixed(config: MixedEnvironment, **keys: Any) -> tuple[MixedRun, Environment]:
    environment = build_environment(config)
    run = MixedRun(
        MemoryStore("mixed"), versions=6, environment=environment, environment_ports=build_ports(config), **keys
    )

    async def work() -> None:
        try:
            await run.run()
        finally:
            await close_environment(environment)

    asyncio.run(work())
    return run, environment


def list_discards(run: Pipeline) -> list[Discard]:
    return [one for entry in read(run.store) if isinstance(entry.body, BatchCommitted) for one in entry.body.discards]


def list_trained(run: Pipeline) -> set[int]:
    bodies = [entry.body for entry in read(run.store) if isinstance(entry.body, BatchCommitted)]
    batches = [TrajectoryBatch.from_bytes(run.store.get(body.file.path)) for body in bodies]
    return {group.key.prompt for batch in batches for group in batch.groups()}


def test_broken_environment_is_removed_and_its_prompts_replaced(caplog: pytest.LogCaptureFixture) -> None:
    run, environment = run_mixed(mix(good=GOOD, bad=BAD))
    assert all(prompt % 2 == 0 for prompt in list_trained(run))
    reasons = {one.key: one.reason for one in list_discards(run)}
    assert DiscardReason.FILTERED in reasons.values()
    assert set(reasons.values()) <= {DiscardReason.UNJUDGED, DiscardReason.FILTERED}
    assert all(key.prompt % 2 for key in reasons)
    removed = [key for key, reason in reasons.items() if reason is DiscardReason.FILTERED]
    assert not any((key.prompt, key.attempt + 1) in reasons for key in removed)  # no such prompt is issued again
    unjudged = [
        one for entry in read(run.store) if isinstance(entry.body, BatchCommitted) for one in entry.body.unjudged
    ]
    assert any("the environment 'bad' is removed: environment.path" in one.why for one in unjudged)
    assert "the environment 'bad' is removed" in caplog.text
    assert audit(run.store).clean
    counts = read_counts(environment)
    assert (counts["good"]["removals"], counts["bad"]["removals"]) == (0.0, 1.0)
    assert counts["bad"]["failures"] >= 2


def test_source_is_closed_if_its_only_environment_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    """Every second prompt source names the broken environment in all of its prompts."""
    run, _ = run_mixed(mix(good=GOOD, bad=BAD), shares=(0.5, 0.5))
    assert all(prompt % 2 == 0 for prompt in list_trained(run))
    removed = [one for one in list_discards(run) if one.reason is DiscardReason.FILTERED]
    assert len(removed) < MOST_REMOVED + 64
    assert "prompts.1 cannot be played" in caplog.text
    assert "the source gets no more prompts until the run is resumed" in caplog.text


def remove_bad() -> MixedEpisodes:
    """Build two environments, of which one is removed."""
    members = {"good": SINGLE_TURN, "bad": SINGLE_TURN}
    return MixedEpisodes("world", None, members, dict.fromkeys(members, NO_LIMITS), {"bad": "it is removed"})


def test_source_with_playable_prompts_stays_open() -> None:
    """More than `MOST_REMOVED` prompts of a removed environment end before the first played group ends."""
    groups = 2 * MOST_REMOVED
    run = MixedRun(
        MemoryStore("mixed"), 2, groups, async_ratio=0, slots=1000, max_inflight_groups=1000, environment=remove_bad()
    )
    run_virtual(run.run())
    assert len(list_trained(run)) == 2 * groups
    assert all(prompt % 2 == 0 for prompt in list_trained(run))


def test_evaluation_leaves_out_prompts_of_removed_environments() -> None:
    async def score(_: ScoreRequest) -> Score:
        return Score(1.0)

    def prompts(first: int, names: Sequence[str], domain: str) -> list[Prompt]:
        numbered = enumerate(names, first)
        return [replace(prompt_at(one), domain=domain, reference={"world": world}) for one, world in numbered]

    async def run() -> Evaluation:
        engine = TimedEngine(TimedEngineConfig(max_new_tokens=8))
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), WeightsProbe((), (), 0.1), "continue")
        sets = {"hard": prompts(2, ["good", "bad", "good"], "hard"), "lost": prompts(5, ["bad"], "lost")}
        held_out = prompts(0, ["good", "bad"], "main")
        return await Evaluator(held_out, 2, 1.0, 8, score, sets=sets, environment=remove_bad()).run(proxy, 0)

    found = run_virtual(run())
    assert (found.accuracy, found.responses) == (1.0, 2)
    assert found.sets == {"hard": DomainResult(1.0, 1.0, 4)}


@pytest.mark.parametrize("names", [("bad",), ("bad", "worse")])
def test_run_without_a_working_environment_fails(names: tuple[str, ...]) -> None:
    kinds = dict.fromkeys(names, BAD)
    with pytest.raises(BaseExceptionGroup) as failed:
        run_mixed(mix(**kinds), names=names)
    assert failed.group_contains(ConfigError, match=r"2 episodes in a row failed.*broken world", depth=None)


def test_run_whose_prompts_all_name_a_broken_environment_fails() -> None:
    with pytest.raises(BaseExceptionGroup) as failed:
        run_mixed(mix(good=GOOD, bad=BAD), names=("bad",))
    assert failed.group_contains(ConfigError, match=r"no other prompt source is left", depth=None)


def test_counters_of_all_environments_of_a_process_are_added() -> None:
    used = UsedEnvironments("a:1:1")

    async def run() -> None:
        for _ in range(2):
            environment = used.build(mix(default="count", count=trl("Counter")))
            episode = speak(trl("Counter"), "Done.", prompt=replace(PROMPT, reference={}))
            assert await environment.play(episode) is not None
            await used.close(environment)

    asyncio.run(run())
    [(process, kind, counts)] = used.read()
    assert (process, kind) == ("a:1:1", "count")
    assert (counts["episodes"], counts["resets"], counts["hangs"], counts["removals"]) == (2.0, 2.0, 0.0, 0.0)


def test_episode_of_a_removed_environment_is_unjudged() -> None:
    environment = build_environment(mix(good=GOOD, bad=BAD))
    environment.removals["bad"] = "it is removed"  # type: ignore[attr-defined]
    chosen = environment.choose(replace(PROMPT, reference={"world": "bad"}))  # type: ignore[attr-defined]
    score = asyncio.run(chosen.environment.play(None))
    assert (score.outcome, score.reason, chosen.removal) == (Outcome.UNJUDGED, "it is removed", "it is removed")
