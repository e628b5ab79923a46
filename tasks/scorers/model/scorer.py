"""The scorer of a reward model, which queues responses and sends them to the copies of the model.

    submit --> queue --up to AHEAD batches--> copy 0
                 ^                      `---> copy 1
                 +--- responses of a call that failed

- After a failed call, the responses are sent again until a copy answers, because no response can cause a failure.
- The grade of a response is the model's logit or probability. A response with a grade that is not finite, such as NaN,
  is unjudged. If this happens `judge_tries` times while the copy gives other responses finite grades, the response
  itself is the cause, and it is unparsable.
- If no call runs and no score has come for `deadline_seconds`, the queued responses are unjudged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollflow.storage.records import Outcome
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.scorers.base import (
    LARGEST,
    LONGEST_REASON,
    Score,
    Scorer,
    ScoreRequest,
    ScorerUsage,
    failure_score,
    make_storable,
)
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.model.copies import Grade, ModelCopies
from rollflow.tasks.scorers.model.inputs import Conversation
from rollflow.tasks.scorers.verifier import answer_of, apply_threshold, finish_score

# largest number of batches of responses in a call of the model; several batches allow sorting by length
AHEAD = 4
AGAIN_SECONDS = 0.5  # seconds before the next try to call a copy of the model
MOST_ODD = 10_000  # largest number of remembered responses for which the model gave no finite number
CHECK_SECONDS = 1.0  # seconds between two checks of the queue for late responses

Decode = Callable[[Sequence[int], bool], str]


@dataclass(eq=False, slots=True)
class GradingJob:
    """A response that waits for its score."""

    conversation: Conversation
    response: str
    tokens: int
    future: asyncio.Future[Score]
    began: float


class ModelScorer(Scorer):
    """Scores responses with a reward model."""

    def __init__(self, config: ModelReward, decode: Decode, copies: ModelCopies) -> None:
        """Create a scorer that uses the copies of the model. `decode` converts tokens to text, with or without special
        tokens.
        """
        self._config, self._decode, self._copies = config, decode, copies
        self._waiting = deque[GradingJob]()
        self._news = asyncio.Event()
        self._calls = 0  # number of running calls
        self._moved = -math.inf  # time of the last score
        self._known: Conversation | None = None  # the newest response with a finite grade
        self._lowest = 0.0  # the lowest value of a response so far, at most 0
        # response -> number of calls in which only this response had no finite grade
        self._odd: OrderedDict[str, int] = OrderedDict()
        self._why = "no copy of the model has started yet"
        self._tasks: list[asyncio.Task[None]] = []
        self.usage = ScorerUsage()

    async def start(self) -> None:
        """Start the copies of the model, if this process owns them, and the asyncio tasks that call them."""
        await self._copies.start()
        loops = [self._run_lane(number) for number in range(self._config.workers)]
        self._tasks = [asyncio.create_task(loop) for loop in (*loops, self._expire())]

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Queue requests and return a future of each score, in the order of the requests."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Score]] = [loop.create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            try:
                text = self._decode(list(Int32s.of(request.tokens)), self._config.special_tokens)
            # These errors are raised if a user-defined environment passed an invalid request.
            except (TypeError, ValueError, OverflowError) as error:
                future.set_result(failure_score("request", error))
                continue
            conversation = [*request.messages], answer_of(text, self._config.answer)
            self._waiting.append(GradingJob(conversation, text, len(request.tokens), future, loop.time()))
        self._news.set()
        return futures

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close the scorer."""
        await finished.wait()
        await self.close()

    async def close(self) -> None:
        """End the asyncio tasks that call the model's copies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_lane(self, number: int) -> None:
        """Send responses to copy `number` of the model, one call after another."""
        while True:
            try:
                await self._copies.wait_ready(number)
                await self._call(number, await self._take())
            except Exception as error:  # noqa: BLE001 - the response cannot have caused it; the keeper restarts a copy
                self._why = (str(error).strip() or type(error).__name__).splitlines()[0]
                await asyncio.sleep(AGAIN_SECONDS)

    async def _take(self) -> list[GradingJob]:
        """Wait for responses in the queue, and remove the share of one copy."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        share = math.ceil(len(self._waiting) / self._config.workers)
        return [self._waiting.popleft() for _ in range(min(share, AHEAD * self._config.max_batch))]

    async def _call(self, number: int, jobs: list[GradingJob]) -> None:
        """Grade responses with a copy of the model; queue them again if the call fails."""
        loop, is_graded = asyncio.get_running_loop(), False
        started, self._calls = loop.time(), self._calls + 1
        try:
            grades = await self._copies.grade(number, [job.conversation for job in jobs])
            works = await self._works(number, jobs, grades)
            is_graded = True
        finally:
            self._calls -= 1
            if not is_graded:
                self._waiting.extendleft(reversed(jobs))
                self._news.set()
        self._moved = loop.time()
        self.usage.busy_seconds += self._moved - started
        for job, grade in zip(jobs, grades, strict=True):
            self._settle(job, replace(self._score(job, grade, works), seconds=self._moved - started))

    async def _works(self, number: int, jobs: Sequence[GradingJob], grades: Sequence[Grade]) -> bool:
        """Return whether copy `number` of the model gives finite grades. If no response of a call has a finite grade,
        the copy grades an earlier response again.
        """
        for job, grade in zip(jobs, grades, strict=True):
            if is_number(self._config, grade):
                self._known = job.conversation
                self._lowest = min(self._lowest, compute_value(self._config, grade))
        if any(is_number(self._config, grade) for grade in grades):
            return True
        if self._known is None or not any(is_odd(self._config, grade) for grade in grades):
            return False
        [again] = await self._copies.grade(number, [self._known])
        return is_number(self._config, again)

    async def _expire(self) -> None:
        """Give queued responses the outcome "unjudged" after their deadline, while no copy of the model answers."""
        while True:
            await asyncio.sleep(min(CHECK_SECONDS, self._config.deadline_seconds / 4))
            limit = asyncio.get_running_loop().time() - self._config.deadline_seconds
            while not self._calls and self._waiting and max(self._waiting[0].began, self._moved) < limit:
                seconds = self._config.deadline_seconds
                reason = f"the reward model gave no score for {seconds:g} s: {self._why}"
                self._settle(self._waiting.popleft(), _build_unjudged(reason))

    def _score(self, job: GradingJob, grade: Grade, works: bool) -> Score:
        """Compute the score of a response; `works` is True if the copy gives other responses finite grades."""
        score = score_grade(self._config, grade)
        if works and is_odd(self._config, grade) and self._count_odd(job) >= self._config.judge_tries:
            reason = f"{score.reason}, {self._config.judge_tries} times or more, while it gave other responses a number"
            score = replace(score, value=self._lowest, reason=reason, outcome=Outcome.UNPARSABLE, failed=True)
        return finish_score(score, self._config, job.response, job.tokens)

    def _count_odd(self, job: GradingJob) -> int:
        """Count a call in which the response had no finite grade, and return the count."""
        key = hashlib.sha256(json.dumps(job.conversation).encode()).hexdigest()
        self._odd[key] = self._odd.get(key, 0) + 1
        if len(self._odd) > MOST_ODD:
            self._odd.popitem(last=False)
        return self._odd[key]

    def _settle(self, job: GradingJob, score: Score) -> None:
        self.usage.scored += 1
        if not job.future.done():
            job.future.set_result(score)


def compute_value(config: ModelReward, grade: Grade) -> float:
    """Return the reward for a grade, which may be NaN or infinite."""
    return config.scale * grade.raw + config.offset


def is_odd(config: ModelReward, grade: Grade) -> bool:
    """Return whether grading succeeded, but the reward is not a finite float32 number."""
    return not grade.fault and not abs(compute_value(config, grade)) <= LARGEST  # also true for NaN


def is_number(config: ModelReward, grade: Grade) -> bool:
    """Return whether grading succeeded and the reward is a finite float32 number."""
    return not grade.fault and not is_odd(config, grade)


def score_grade(config: ModelReward, grade: Grade) -> Score:
    """Compute the score of a response from the model's grade."""
    what = "logit" if config.label is None else f"probability of {config.label!r}"
    value = compute_value(config, grade)
    if not is_number(config, grade):
        return _build_unjudged(f"the reward model gave no number: {grade.fault or f'the {what} is {grade.raw}'}")
    cut = f", {grade.cut} tokens cut off" if grade.cut else ""
    score = Score(value, make_storable(f"{what} {grade.raw:.6g}{cut}", LONGEST_REASON))
    return apply_threshold(score, config.correct_from)


def _build_unjudged(reason: str) -> Score:
    return Score(0.0, make_storable(reason, LONGEST_REASON), Outcome.UNJUDGED)
