"""Exchanges scoring requests and scores with the reward actor and its helpers.

    score([...])  ------> the first scores, and a ticket if scores are missing
    await_more(ticket) -> further scores, after a short wait

A slow score does not delay the other scores of its call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.scorers.base import Score, ScoreColumns, Scorer, ScoreRequest

PACKET_SECONDS = 0.05  # seconds that the first scores of a call wait, so that more scores are returned with them
POLL_SECONDS = 2.0  # longest time, in seconds, that one call waits for a score

# a scoring request as it is sent: the bytes of its int32 tokens, and the other fields of `ScoreRequest`
PackedRequest = tuple[bytes, Mapping[str, Any], str, Sequence[Mapping[str, str]], Sequence[bytes], bool]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Scores of responses, each with the position of its request, as tuples that are quick to pickle.

    `ticket` is the number to pass to `await_more` to get the missing scores; it is None if no score is missing.
    """

    scores: list[tuple[int, ScoreColumns]]
    ticket: int | None


class ScoreCalls:
    """The calls of `score` that an actor has not yet answered with all their scores."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._open: dict[int, dict[asyncio.Future[Score], int]] = {}  # ticket -> position of each missing score

    async def score(self, scorer: Scorer, requests: Sequence[PackedRequest]) -> Verdicts:
        """Start scoring these requests, and return the first scores."""
        ticket, to_come = next(self._tickets), scorer.submit([unpack_request(request) for request in requests])
        self._open[ticket] = {future: place for place, future in enumerate(to_come)}
        return await self.await_more(ticket)

    async def await_more(self, ticket: int) -> Verdicts:
        """Wait a short time, and return further scores of the earlier call of `score` that `ticket` identifies."""
        to_come = self._open[ticket]
        done, _ = await asyncio.wait(to_come, timeout=PACKET_SECONDS)
        if not done:
            done, _ = await asyncio.wait(to_come, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        judged = [(to_come.pop(future), future.result()) for future in done]
        if not to_come:
            del self._open[ticket]
        return Verdicts([(place, score.to_columns()) for place, score in judged], ticket if to_come else None)


async def stream_scores(
    actor: Any, requests: Sequence[ScoreRequest], answer_seconds: float
) -> AsyncIterator[list[tuple[int, Score]]]:
    """Have an actor score these requests by its methods `score` and `await_more`; yield each score with its request's
    position.

    Raises:
        TimeoutError: the actor did not answer a call for `answer_seconds`.
        RayError: the actor has died or failed.
    """
    call = actor.score.remote([pack_request(one) for one in requests])
    while True:
        async with asyncio.timeout(answer_seconds):
            verdicts: Verdicts = await call
        yield [(place, Score.of_columns(columns)) for place, columns in verdicts.scores]
        if verdicts.ticket is None:
            return
        call = actor.await_more.remote(verdicts.ticket)


def pack_request(request: ScoreRequest) -> PackedRequest:
    """Return a request as plain values, which are quick to pickle."""
    peers = [Int32s.of(tokens).data for tokens in request.peers]
    return Int32s.of(request.tokens).data, request.reference, request.scorer, request.messages, peers, request.adapts


def unpack_request(packed: PackedRequest) -> ScoreRequest:
    """Return the request that `pack_request` packed."""
    tokens, reference, scorer, messages, peers, adapts = packed
    return ScoreRequest(Int32s(tokens), reference, scorer, messages, [Int32s(peer) for peer in peers], adapts)
