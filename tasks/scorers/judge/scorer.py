"""A scorer that asks a judge, a language model behind an OpenAI-compatible endpoint, to score responses.

    response --(text)--> questions, `repeats` of each --cache--> endpoint --> mean of the verdicts

    verdict     one question: a score on a scale
    rubric      one question: which statements are true; each statement is a part of the score
    pairwise    a question for each opponent: the other responses of the group, or else the reference answer; the value
                is the share of the points that the response wins

- A response without a verdict is unjudged, or gets the value 0 if the response may be the cause (see `endpoint`).
- With `repeats`, the part "disagreement" is the mean difference between two verdicts on the same question.
- Equal questions are asked only once while the verdict is cached or pending. A request with `uses_cache = False` asks
  all its questions again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import statistics
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rollflow.storage.records import Outcome
from rollflow.storage.run_records.judge_usage import JudgeUsage
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.scorers.base import (
    LONGEST_REASON,
    Score,
    Scorer,
    ScoreRequest,
    ScorerUsage,
    Unjudged,
    failure_score,
    make_storable,
)
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.judge.endpoint import Endpoint, NoVerdict
from rollflow.tasks.scorers.judge.prompts import (
    JudgeQuestion,
    Material,
    Verdict,
    ask_comparison,
    ask_rubric,
    ask_verdict,
    describe_material,
    read_rubric,
)
from rollflow.tasks.scorers.verifier import answer_of, finish_score

T = TypeVar("T")
EMPTY = Score(0.0, "the response has no text to judge", Outcome.UNPARSABLE)


class JudgeScorer(Scorer):
    """Scores responses by a judge."""

    def __init__(
        self, config: JudgeReward, policy_folder: Path, section: str = "reward", used: JudgeUsage | None = None
    ) -> None:
        """Create a scorer that adds the judge's tokens to `used`, which may contain the tokens of earlier processes."""
        self._config, self._folder = config, policy_folder
        self._endpoint = Endpoint(config, section, used)
        self._cache: OrderedDict[str, asyncio.Task[list[Verdict]]] = OrderedDict()
        self._tasks: set[asyncio.Task[Score]] = set()
        self._tokenizer: PolicyTokenizer | None = None
        self._busy_since = 0.0  # monotonic time since which responses wait for a score; 0 if no response waits
        self.usage = ScorerUsage()

    async def start(self) -> None:
        """Load the tokenizer and create the client of the judge's endpoint.

        Raises:
            ConfigError: the environment variable with the endpoint's API key is not set, or a package is missing.
        """
        self._tokenizer = await asyncio.to_thread(PolicyTokenizer, self._folder)
        await self._endpoint.open()

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to judge responses, and return a future of each score, in the order of the requests.

        A future raises `ConfigError` if the judge's endpoint has failed.
        """
        tasks = [asyncio.get_running_loop().create_task(self._score(request)) for request in requests]
        for task in tasks:
            self._busy_since = self._busy_since or time.monotonic()
            self._tasks.add(task)
            task.add_done_callback(self._note_done)
        return list[asyncio.Future[Score]](tasks)

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close the scorer; raise `ConfigError` if the judge's endpoint has
        failed.
        """
        ends = [asyncio.create_task(event.wait()) for event in (finished, self._endpoint.failed)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if not finished.is_set():
            raise self._endpoint.error
        await self.close()

    async def close(self) -> None:
        """Cancel all calls of the judge, and close the connections."""
        tasks = [*self._tasks, *self._cache.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._endpoint.close()

    def _note_done(self, task: asyncio.Task[Score]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.usage.busy_seconds += time.monotonic() - self._busy_since
            self._busy_since = 0.0

    async def _score(self, request: ScoreRequest) -> Score:
        started = time.perf_counter()
        try:
            text = self._decode(request.tokens)
            try:
                score = await self._judge(answer_of(text, self._config.answer), request)
            except NoVerdict as error:
                score = Score(0.0, make_storable(str(error), LONGEST_REASON), error.outcome, failed=True)
            score = finish_score(score, self._config, text, len(request.tokens))
        except Unjudged as error:
            score = Score(0.0, make_storable(str(error), LONGEST_REASON), Outcome.UNJUDGED)
        except (TypeError, ValueError) as error:  # raised if a user-defined environment passed an invalid request
            score = failure_score("request", error)
        self.usage.scored += 1
        return replace(score, seconds=time.perf_counter() - started)

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None, "the scorer is started"
        return self._tokenizer.decode_response(list(tokens), self._config.special_tokens)

    async def _judge(self, response: str, request: ScoreRequest) -> Score:
        """Judge the text of a response.

        Raises:
            Unjudged: the judge gave no verdict.
            NoVerdict: the judge gave no verdict, and the response may be the cause.
            ConfigError: the judge's endpoint has failed.
            ValueError: the data row has no valid rubric.
        """
        config, cached = self._config, request.uses_cache
        material = describe_material(request.messages, request.reference)
        if not response.strip():
            return EMPTY
        if config.mode == "verdict":
            return _combine(await self._ask([ask_verdict(config, material, response)] * config.repeats, cached))
        if config.mode == "rubric":
            rubric = read_rubric(config, request.reference)
            return _combine(await self._ask([ask_rubric(config, material, response, rubric)] * config.repeats, cached))
        peers = [answer_of(self._decode(tokens), config.answer) for tokens in request.peers]
        return await self._compare(response, material, choose_opponents(response, peers, config.opponents), cached)

    async def _compare(self, response: str, material: Material, peers: Sequence[str], cached: bool) -> Score:
        """Compare a response with other responses; the score is the share of points that the response wins."""
        others = peers or ([material.answer] if material.answer.strip() else [])
        if not others:
            raise Unjudged(
                'with the mode "pairwise", a response needs another response or a reference answer to be compared '
                "with, and has neither"
            )
        found = await _gather([self._compare_pair(response, other, material, cached) for other in others])
        scores = [_combine(verdicts) for verdicts in found]
        points = [score.value for score in scores]
        lost = next((score.reason for score in scores if score.value < 1), "")
        reason = make_storable(f"{sum(points):g} points in {len(points)} comparisons; {lost}", LONGEST_REASON)
        disagreement = [score.parts["disagreement"] for score in scores if "disagreement" in score.parts]
        parts = {"disagreement": statistics.fmean(disagreement)} if disagreement else {}
        return Score(statistics.fmean(points), reason, parts=parts)

    async def _compare_pair(self, response: str, other: str, material: Material, cached: bool) -> list[Verdict]:
        """Return the judge's verdicts on a pair of responses, with the points of `response` as values.

        The order of the pair depends on a hash of both texts, and alternates with each repetition, so neither response
        is always first. For both responses of a pair, the judge gets the same question.
        """
        if not other.strip() or response == other:
            return [Verdict(0.5 if response == other else 1.0, "no comparison needed", {})]
        pair = sorted((response, other), key=_hash)
        orders = [pair, pair[::-1]]
        questions = [ask_comparison(self._config, material, *orders[n % 2]) for n in range(self._config.repeats)]
        try:
            verdicts = await self._ask(questions, cached)
        except NoVerdict as error:
            return [Verdict(0.0, str(error), {})]
        is_first = itertools.cycle([response == pair[0], response != pair[0]])
        return [
            verdict if first else verdict._replace(value=1.0 - verdict.value)
            for verdict, first in zip(verdicts, is_first, strict=False)
        ]

    async def _ask(self, questions: Sequence[JudgeQuestion], cached: bool) -> list[Verdict]:
        """Ask the judge a question several times, or return the verdicts from the cache if `cached` allows it."""
        key = _hash(questions[0].text)
        task = self._cache.get(key)
        if task is None or not cached:
            asked = [self._endpoint.ask(question, repeat) for repeat, question in enumerate(questions)]
            if not cached:
                return await _gather(asked)
            task = self._cache[key] = asyncio.get_running_loop().create_task(_gather(asked))
            task.add_done_callback(lambda done: self._settle(key, done))
        self._cache.move_to_end(key)
        return await asyncio.shield(task)

    def _settle(self, key: str, task: asyncio.Task[list[Verdict]]) -> None:
        """Remove a failed question from the cache, and the oldest verdicts if the cache is full."""
        if task.cancelled() or task.exception() is not None:
            self._cache.pop(key, None)
        excess = max(0, len(self._cache) - self._config.cache_entries)
        for name in [*itertools.islice(self._cache, excess)]:
            if self._cache[name].done():
                del self._cache[name]


def choose_opponents(response: str, peers: Sequence[str], most: int | None) -> Sequence[str]:
    """Choose up to `most` opponents of a response: its neighbours on a ring of all responses to the same prompt.

    The order of the ring depends only on hashes, so that every response is an opponent of its own opponents.
    """
    if most is None or len(peers) <= most:
        return peers
    ring = sorted([response, *peers], key=_hash)
    place = ring.index(response)
    return [ring[(place + step) % len(ring)] for step in range(-(most // 2), most // 2 + 1) if step]


async def _gather(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all calls; if some calls fail, raise the first error after all calls have ended."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    values = list[T]()
    for one in found:
        if isinstance(one, BaseException):
            raise one
        values.append(one)
    return values


def _combine(verdicts: Sequence[Verdict]) -> Score:
    """Return the mean of verdicts as a score, with a part "disagreement" for several verdicts."""
    value = statistics.fmean(verdict.value for verdict in verdicts)
    names = verdicts[0].parts
    parts = {name: statistics.fmean(verdict.parts[name] for verdict in verdicts) for name in names}
    if len(verdicts) > 1:
        pairs = itertools.combinations([verdict.value for verdict in verdicts], 2)
        parts["disagreement"] = statistics.fmean(abs(one - other) for one, other in pairs)
    return Score(value, make_storable(verdicts[0].reason, LONGEST_REASON), parts=parts)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
