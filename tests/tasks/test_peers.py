"""A scorer that compares the responses of a group gets all of them, and no missing response holds up the group."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.actors.reward_helpers.calls import pack_request, unpack_request
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.rollout.limits import JudgingLimits
from rollflow.tasks.rollout.peers import GroupPeers
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.expected import expected_of
from tests.support.pipeline import Pipeline

SIZE = 4


class Comparing(Pipeline):
    """A pipeline whose scorer notes the requests of each prompt, and judges none of the first ones."""

    unjudged = 0
    asked: dict[int, list[ScoreRequest]]  # prompt index -> requests

    def _prompt(self, index: int) -> Prompt:
        return replace(super()._prompt(index), reference={"index": index})

    async def _score(self, request: ScoreRequest) -> Score:
        self.asked[request.reference["index"]].append(request)
        if sum(map(len, self.asked.values())) <= self.unjudged:
            return Score(0.0, "away", Outcome.UNJUDGED)
        return await super()._score(request)


def build_pipeline(versions: int = 3, **more: Any) -> Comparing:
    choices = {"judging": {"": JudgingLimits(2, 10**6, compares_group=True)}, **more.pop("choices", {})}
    store = MemoryStore(uuid.uuid4().hex)
    pipeline = Comparing(store, versions=versions, group_size=SIZE, choices=choices, **more)
    pipeline.asked = defaultdict(list)
    return pipeline


def run_and_audit(pipeline: Comparing) -> None:
    run_virtual(asyncio.wait_for(pipeline.run(), 1e4))
    assert pipeline.state.version == pipeline.versions
    assert audit(pipeline.store, deep=True, expected=expected_of(pipeline)).violations == []


def test_group_scorer_gets_all_other_responses_to_the_prompt() -> None:
    pipeline = build_pipeline(async_ratio=0.0)
    run_and_audit(pipeline)
    assert pipeline.asked
    for requests in pipeline.asked.values():
        responses = [list(request.tokens) for request in requests]
        assert len(responses) == SIZE
        for request in requests:
            peers = [list(peer) for peer in request.peers]
            assert sorted([*peers, list(request.tokens)]) == sorted(responses)


@pytest.mark.parametrize(
    "more",
    [
        {"choices": {"redundant_responses": 2}},
        {"choices": {"redundant_responses": 1, "redundant_groups": 2, "on_stale": "drop"}},
        {"choices": {"tail_batching": True}, "async_ratio": 2.0},
        {"choices": {"on_stale": "drop"}, "async_ratio": 0.5},
        {"engines": 2, "engine_deaths": ((0.5, 0), (1.5, 1))},
    ],
)
def test_aborted_responses_do_not_delay_a_group_scorer(more: dict[str, Any]) -> None:
    pipeline = build_pipeline(**more)
    run_and_audit(pipeline)
    assert {len(request.peers) for requests in pipeline.asked.values() for request in requests} == {SIZE - 1}


def test_unjudged_response_is_judged_again_with_its_group() -> None:
    pipeline = build_pipeline(versions=1)
    pipeline.unjudged = 3
    run_and_audit(pipeline)
    assert {len(request.peers) for requests in pipeline.asked.values() for request in requests} == {SIZE - 1}


class SometimesJudging(Environment):
    """An environment that scores each second episode itself; it also scores in the middle of an episode."""

    def __init__(self) -> None:
        self.played = 0

    async def play(self, episode: Episode) -> Score | float | None:
        self.played += 1
        number = self.played
        generation = await episode.generate()
        if generation is None:
            return None
        await episode.score(generation.tokens)
        return 0.5 if number % 2 else await episode.judge(generation.tokens)


def test_group_scorer_does_not_wait_for_unfinished_episodes() -> None:
    pipeline = build_pipeline(environment=SometimesJudging())
    run_and_audit(pipeline)
    found = {len(request.peers) for requests in pipeline.asked.values() for request in requests}
    assert 0 in found, "a score in the middle of an episode compares with nothing"
    assert max(found) < SIZE


async def test_cancelled_group_does_not_wait_for_its_responses() -> None:
    peers = GroupPeers(2)
    waiting = asyncio.create_task(peers.arrive(0, [1]))
    await asyncio.sleep(0)
    assert not waiting.done()
    peers.cancel()
    assert await waiting is None
    assert await peers.arrive(1, [2]) is None


def test_other_responses_of_a_group_reach_the_reward_actor() -> None:
    request = ScoreRequest([1, 2], {"answer": 3}, "name", [{"role": "user", "content": "?"}], [[4], [5, 6]])
    found = unpack_request(pack_request(request))
    assert list(found.tokens) == [1, 2]
    assert [list(peer) for peer in found.peers] == [[4], [5, 6]]
    assert (found.scorer, found.messages, found.reference) == (request.scorer, request.messages, request.reference)
