"""Defines the requests of a timed engine, and the counters of the engine's work."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Generation, GenerationRequest


@dataclass(eq=False, slots=True)
class TimedRun:
    """One request of a timed engine, with the tokens that will be generated and the engine's work at which the request
    ends.
    """

    request: GenerationRequest
    tokens: Int32s
    ending: StopReason
    per_token: float  # seconds of work per token
    needs: float  # seconds of work that all tokens of the request need
    done: asyncio.Future[Generation]
    running: bool = False
    over: bool = False
    finish: float = 0.0
    length: float = 0.0  # length of the whole response, in real tokens
    before: float = 0.0  # number of real tokens before the response: the prompt, and the episode's earlier turns
    cached: float = 0.0  # number of real tokens that were in the KV cache when the request started to run
    version: int = -1  # the engine's policy version when the request started to run
    updates: int = 0  # number of weight updates before the request started to run


@dataclass(slots=True)
class EngineUsage:
    """Counters of a timed engine's work since the engine was created."""

    busy_seconds: float = 0.0  # seconds with at least one running request
    slot_seconds: float = 0.0  # running time of requests, in seconds, summed over all requests
    tokens: int = 0  # number of sampled tokens, including those of aborted responses
    restarted: int = 0  # number of sampled tokens lost because a weight update restarted responses
    preempted: int = 0  # number of requests preempted because the KV cache was full
    context: float = 0.0  # number of prompt and prefix tokens of started requests, in real tokens
    cached: float = 0.0  # number of prompt and prefix tokens that were in the KV cache
