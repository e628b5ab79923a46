"""The program of a scorer's worker process, which reads requests and writes scores as JSON lines.

The first output line says that the worker process is ready, with the scorer's version, or why it cannot start.

If the verifier scores one response per call, each input line is a request, and each output line its score, in the same
order.

If the verifier scores several responses, each input line is a list of numbered requests, and scores are written in any
order with these numbers.

The process is started as `python -m rollflow.tasks.scorers.worker REWARD TOKENIZER_FOLDER EAR FIGURES`, where `REWARD`
is the `[reward]` section as JSON. The worker process sends warnings to the socket `EAR` and counts of sandboxes to the
file `FIGURES`, both given as file descriptors. The worker process ends when its input ends, so it cannot outlive its
parent process. An error in a verifier becomes a score of 0.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter

from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.runtime.actor_warnings import send_to
from rollflow.tasks.runtime.memory_limit import limit_memory
from rollflow.tasks.sandboxes.figures import figures_of_process
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import Score, failure_score, is_cancelled, timeout_score, validate_score
from rollflow.tasks.scorers.code.deadlines import CLOCK, CaseClock, DeadlineReport, Rechecks
from rollflow.tasks.scorers.config import (
    ChoiceReward,
    CompositeReward,
    ExactReward,
    InstructionsReward,
    MathsReward,
    RegexReward,
    RewardConfig,
)
from rollflow.tasks.scorers.token_values import place_values
from rollflow.tasks.scorers.verifier import Verifier, answer_of, finish_score, score_response
from rollflow.tasks.scorers.version import compute_version

REWARD: TypeAdapter[RewardConfig] = TypeAdapter(RewardConfig)
MEMORY_BYTES = 4 * 2**30  # memory limit of a worker process whose verifier only reads texts, in bytes


@dataclass(frozen=True, slots=True)
class _TextRequest:
    """A numbered scoring request, with the response as text."""

    number: int
    tokens: Sequence[int]
    response: str
    reference: Mapping[str, Any]
    clock: CaseClock | None = None  # None if the deadlines of test cases are fixed


@dataclass(frozen=True, slots=True)
class _Worker:
    """The verifier, the tokenizer and the output stream of this worker process."""

    config: RewardConfig
    verifier: Verifier
    tokenizer: PolicyTokenizer
    answers: TextIO
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # tasks that score a response
    rechecks: Rechecks = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rechecks", Rechecks(lambda: not self.tasks, self._write_report))

    def run_one_by_one(self) -> None:
        """Read requests and score one response after another, until the input ends."""
        for line in sys.stdin:
            one = self._read_request(0, json.loads(line))
            verify = functools.partial(self.verifier, tokens=one.tokens)
            score = score_response(verify, self.config.answer, one.response, one.reference)
            self._write(self._finish(score, one, score.seconds).to_columns())

    async def run_several(self) -> None:
        """Read requests and score several responses at a time, until the input ends."""
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = [self._read_request(*one) for one in json.loads(line)]
            for together in [asked] if self.verifier.takes_several else [[one] for one in asked]:
                task = loop.create_task(self._score(together))
                self.tasks.add(task)
                task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.rechecks.begin()

    async def _score(self, asked: Sequence[_TextRequest]) -> None:
        """Score responses in one call of the verifier; if the call fails, call it again for each response."""
        started, config = time.perf_counter(), self.config
        CLOCK.set(asked[0].clock if len(asked) == 1 else None)
        limit = asyncio.timeout(config.deadline_seconds)
        try:
            async with limit:
                answers = [answer_of(one.response, config.answer) for one in asked]
                references, tokens = [one.reference for one in asked], [one.tokens for one in asked]
                found = await self.verifier.call(answers, references, tokens)
        except (Exception, asyncio.CancelledError) as error:  # user code failed, and its error becomes the reason
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if len(asked) > 1:
                await asyncio.gather(*(self._score([one]) for one in asked))
                return
            late = isinstance(error, TimeoutError) and limit.expired()
            seconds = config.deadline_seconds
            scores = [timeout_score(seconds, config.failure_value) if late else failure_score("verifier", error)]
        else:
            scores = [validate_score("verifier", one) for one in found]
        seconds = time.perf_counter() - started
        for one, score in zip(asked, scores, strict=True):
            columns = self._finish(score, one, seconds).to_columns()
            self._write((one.number, columns, one.clock.report.to_columns()) if one.clock else (one.number, columns))
            if one.clock:
                self.rechecks.add(one.clock)

    def _finish(self, score: Score, one: _TextRequest, seconds: float) -> Score:
        placed = place_values(score, self.config, self.tokenizer, one.tokens, one.response)
        if placed.failed:  # an error outside of the parts of a composite reward
            placed = replace(placed, value=self.config.failure_value)
        return replace(finish_score(placed, self.config, one.response, len(one.tokens)), seconds=seconds)

    def _read_request(self, number: int, asked: Mapping[str, Any], row: Sequence[Any] | None = None) -> _TextRequest:
        """Decode a numbered request, which may have measured times for adaptive deadlines."""
        clock = CaseClock(row[0], {int(case): float(seconds) for case, seconds in row[1]}) if row else None
        tokens = list(Int32s(bytes.fromhex(asked["tokens"])))
        text = self.tokenizer.decode_response(tokens, self.config.special_tokens)
        return _TextRequest(number, tokens, text, asked["reference"], clock)

    def _write_report(self, report: DeadlineReport) -> None:
        self._write((-1, None, report.to_columns()))

    def _write(self, answer: object) -> None:
        self.answers.write(json.dumps(answer) + "\n")


def is_bounded(config: RewardConfig) -> bool:
    """Return whether worker processes get a memory limit, which they do if only rollflow's own code reads the
    responses.
    """
    if isinstance(config, CompositeReward):
        return all(is_bounded(part.scorer) for part in config.parts.values())
    return isinstance(config, ExactReward | MathsReward | ChoiceReward | RegexReward | InstructionsReward)


def main() -> None:
    """Score the requests that arrive on the standard input, until the input ends."""
    # The parent process handles Ctrl-C; this handler does nothing, because programs would inherit an ignored signal.
    signal.signal(signal.SIGINT, lambda *_: None)
    figures_of_process().share(int(sys.argv[4]))
    config, folder = REWARD.validate_json(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # text that a verifier prints must not be read as a score
    try:
        verifier, tokenizer = build_verifier(config), PolicyTokenizer(folder)
        version = compute_version(config)
    except Exception as error:  # the parent process reports the error to the user
        answers.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        raise
    send_to(socket.socket(fileno=int(sys.argv[3])), "a reward worker")
    if is_bounded(config):
        limit_memory(MEMORY_BYTES)
    worker = _Worker(config, verifier, tokenizer, answers)
    answers.write(f"ready {version}\n")
    if verifier.scores_several:
        with asyncio.Runner() as runner:
            try:
                runner.run(worker.run_several())
            except SystemExit:  # raised by a task of the verifier
                os._exit(1)  # closing the event loop would wait for the thread that reads the input
    else:
        worker.run_one_by_one()


if __name__ == "__main__":
    main()
