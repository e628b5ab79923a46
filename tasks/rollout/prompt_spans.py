"""Records OpenTelemetry spans of each prompt, until its responses are committed or discarded; see
`tasks.runtime.spans`."""

from __future__ import annotations

import asyncio

from rollflow.storage.records import Discard, GroupKey, Trajectory
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.runtime.spans import Spans


class PromptSpans:
    """Records an OpenTelemetry trace for each issued prompt. Times are read from the clock of the event loop."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._started: dict[GroupKey, float] = {}  # key of an unfinished group of responses -> start time
        # key of a group whose responses all have rewards -> time of the last reward
        self._complete: dict[GroupKey, float] = {}

    def start(self, key: GroupKey) -> None:
        """Note the start of an attempt to answer a prompt."""
        if self._spans.on:
            self._started[key] = self._now()

    def respond(self, key: GroupKey, trajectory: Trajectory) -> None:
        """Record the generation and the scoring of a response."""
        if self._spans.on:
            generated, scored = trajectory.generation_seconds, trajectory.reward_seconds
            more = {"rollflow.sample": trajectory.sample, "rollflow.started_version": trajectory.started_version}
            tokens = trajectory.response_tokens
            ending = str(trajectory.ending)
            self._spans.record_prompt(key, "generate", generated, scored, tokens=tokens, ending=ending, **more)
            paid = {} if trajectory.left_out else {"reward": trajectory.reward}
            self._spans.record_prompt(key, "score", scored, **paid, **more)

    def complete(self, key: GroupKey) -> None:
        """Record that all responses to a prompt have rewards and now wait for a batch."""
        if self._spans.on:
            self._complete[key] = self._now()

    def discard(self, discard: Discard) -> None:
        """Record the end of a group of responses that is not trained on."""
        self._end(discard.key, f"discarded: {discard.reason.value}")

    def commit(self, staged: StagedBatch) -> None:
        """Record the end of the groups of responses that are in a committed batch."""
        for group in staged.groups:
            self._end(group.key, f"trains version {staged.number + 1}")

    def _end(self, key: GroupKey, fate: str) -> None:
        now, started, complete = self._now(), self._started.pop(key, None), self._complete.pop(key, None)
        if complete is not None:
            self._spans.record_prompt(key, "wait", now - complete)
        if started is not None:
            self._spans.record_prompt(key, "prompt", now - started, fate=fate)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
