"""Judges stored responses again with the scorers of a config, and compares the new verdicts with the stored ones.

    stored batch --rows--> requests, as the run made them --scorers of today--> verdicts --compare--> changes

Each response is sent to its scorer as in the run, except that deadlines of test cases are at their maximum. A verdict
has changed if the reward, the outcome or the reward of a token has changed. Nothing is written to the run.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.records import GroupKey, Outcome, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.environments.config import SingleTurnEnvironment
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.rollout.judging import judge_repeatedly
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.reward_models import local_copies
from rollflow.tasks.scorers import build_scorers
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest
from rollflow.tasks.scorers.config import name_section

AT_A_TIME = 512  # largest number of responses that wait for a score at the same time
TICK_SECONDS = 1.0  # longest time in seconds between two reports of the progress
UNRECORDED = "not recorded"  # shown for the outcome or scorer version of a response if an older run did not record it

# called with a policy version, its number of responses, and the number of responses that have a score
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """A response of a stored batch, with its recorded verdict and the request with which it can be judged again."""

    version: int  # the policy version that was trained on the response
    key: GroupKey
    domain: str
    trajectory: Trajectory
    request: ScoreRequest

    @property
    def name(self) -> str:
        """The name of the trajectory, as used by `rollflow inspect`."""
        return f"{self.key.prompt}.{self.key.attempt}.{self.trajectory.sample}"

    @property
    def outcome(self) -> str:
        """The stored outcome of the response."""
        return UNRECORDED if self.trajectory.outcome is None else self.trajectory.outcome.value


@dataclass(frozen=True, slots=True)
class Rejudged:
    """The stored verdict on a response, and the new score of the same response."""

    stored: StoredVerdict
    score: Score

    @property
    def is_judged(self) -> bool:
        """True if the scorer could judge the response again."""
        return self.score.outcome is not Outcome.UNJUDGED

    @property
    def has_changed(self) -> bool:
        """True if the new verdict differs from the stored verdict in its reward, its outcome or the rewards of tokens.
        Rewards are compared as float32, the type in which batches store rewards.
        """
        before = self.stored.trajectory
        same = before.outcome in (None, self.score.outcome) and self._has_same_tokens
        return self.is_judged and not (same and float(np.float32(self.score.value)) == before.reward)

    @property
    def _has_same_tokens(self) -> bool:
        """True if each token of the response has the same reward as in the run."""
        stored, count = self.stored.trajectory.token_rewards, len(self.stored.request.tokens)
        nothing = Float32s.same(math.nan, count)
        before = nothing if stored is None else Float32s.of(stored)[len(stored) - count :]
        return before == (self.score.token_values or nothing)

    @property
    def is_flip(self) -> bool:
        """True if the same version of the scorer gave another verdict, which shows that the scorer is not
        deterministic. A response that could not be judged during the run has no earlier verdict.
        """
        before = self.stored.trajectory
        was_judged = before.outcome is not Outcome.UNJUDGED
        return self.has_changed and was_judged and self.score.version == before.scorer_version


@dataclass(slots=True)
class DomainVerdicts:
    """The old and new verdicts of one prompt domain. Sums of rewards include only the responses that could be judged
    again.
    """

    responses: int = 0
    unjudged: int = 0
    changed: int = 0
    flips: int = 0
    reward_before: float = 0.0
    reward_now: float = 0.0
    # scorer version -> number of responses scored by this version in the run, and now
    scorers_before: Counter[str] = field(default_factory=Counter)
    scorers_now: Counter[str] = field(default_factory=Counter)

    def add(self, one: Rejudged) -> None:
        """Count a response."""
        self.responses += 1
        self.scorers_before[one.stored.trajectory.scorer_version or UNRECORDED] += 1
        if not one.is_judged:
            self.unjudged += 1
            return
        self.changed += one.has_changed
        self.flips += one.is_flip
        self.reward_before += one.stored.trajectory.reward
        self.reward_now += one.score.value
        self.scorers_now[one.score.version or UNRECORDED] += 1

    @property
    def judged(self) -> int:
        """The number of responses that could be judged again."""
        return self.responses - self.unjudged


@dataclass(slots=True)
class RejudgeReport:
    """The result of judging stored responses again."""

    run: str
    shown: int  # largest number of changed verdicts, and of unjudged responses, that are listed
    versions: list[int] = field(default_factory=list)
    domains: dict[str, DomainVerdicts] = field(default_factory=dict)
    # (stored outcome, new outcome) -> number of responses
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    changes: list[Rejudged] = field(default_factory=list)  # the first changed verdicts
    unjudged: list[Rejudged] = field(default_factory=list)  # the first responses that could not be judged again
    damaged: dict[int, str] = field(default_factory=dict)  # policy version -> why its batch cannot be judged again

    def add(self, one: Rejudged) -> None:
        """Count a response."""
        self.domains.setdefault(one.stored.domain, DomainVerdicts()).add(one)
        if not one.is_judged:
            self.unjudged += [one] if len(self.unjudged) < self.shown else []
            return
        self.outcomes[one.stored.outcome, one.score.outcome.value] += 1
        if one.has_changed and len(self.changes) < self.shown:
            self.changes.append(one)

    @property
    def total(self) -> DomainVerdicts:
        """The sums over all domains."""
        found = DomainVerdicts()
        for one in self.domains.values():
            for name in ("responses", "unjudged", "changed", "flips", "reward_before", "reward_now"):
                setattr(found, name, getattr(found, name) + getattr(one, name))
            found.scorers_before += one.scorers_before
            found.scorers_now += one.scorers_now
        return found

    @property
    def is_same(self) -> bool:
        """True if every response was judged again and no verdict has changed."""
        total = self.total
        return not (total.changed or total.unjudged or self.damaged)


class Rejudging:
    """Judges the stored responses of a run again, with the scorers of `config`."""

    def __init__(self, context: RunContext, config: RunConfig) -> None:
        """Open the run's prompts.

        Raises:
            ConfigError: the environment is not single-turn, so it computes rewards, or the run's prompts have changed.
        """
        if not isinstance(config.environment, SingleTurnEnvironment):
            raise ConfigError(
                f"environment.kind = {config.environment.kind!r}: the environment computed the rewards, and its "
                'episodes cannot be repeated; only runs with environment.kind = "single-turn" can be judged again'
            )
        self._context, self._config, self._scorers = context, config, config.scorers
        self._prompts: RunPrompts = context.prompts()

    async def run(self, versions: Sequence[int], report: RejudgeReport, progress: Progress) -> None:
        """Judge the batches of these policy versions again, and add the verdicts to the report.

        `progress` is called at least every `TICK_SECONDS`; `Progress` says with which arguments.

        Raises:
            ConfigError: a scorer cannot score any response, or a prompt names a scorer that the config lacks.
        """
        scorer = build_scorers(self._scorers, self._context.policy_folder, local_copies(self._context, self._config))
        await scorer.start()
        serving = asyncio.create_task(scorer.serve(asyncio.Event()))  # the task ends only with an error
        try:
            for version in versions:
                report.versions.append(version)
                try:
                    verdicts = self.read_verdicts(version)
                except Corrupt as error:
                    report.damaged[version] = str(error)
                    continue
                for first in range(0, len(verdicts), AT_A_TIME):
                    part = verdicts[first : first + AT_A_TIME]
                    tell = partial(_tell_from, progress, version, len(verdicts), first)
                    for one, score in zip(part, await self._score_all(scorer, serving, part, tell), strict=True):
                        report.add(Rejudged(one, score))
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await scorer.close()

    def read_verdicts(self, version: int) -> list[StoredVerdict]:
        """Return the stored verdicts of the batch that policy version `version` was trained on.

        Raises:
            Corrupt: the batch is damaged, or its responses do not belong to the run's prompts.
            ConfigError: a prompt names a scorer that the config lacks.
        """
        entry = self._context.policies.find(version).batch_entry
        assert entry is not None, "only version 0 has no batch"
        file = self._context.batches.read_commit(entry).file
        batch = TrajectoryBatch.from_bytes(self._context.batches.read(file))
        return list(chain.from_iterable(self._read_group(version, group) for group in batch.groups()))

    def _read_group(self, version: int, group: TrajectoryGroup) -> Iterator[StoredVerdict]:
        prompt = self._prompts.prompt(group.key.prompt)
        if prompt.id != group.prompt_id:
            name = f"{group.key.prompt}.{group.key.attempt}"
            raise Corrupt(
                f"group {name} (prompt.attempt) answers the prompt {group.prompt_id!r}, but this number now means "
                f"the prompt {prompt.id!r}"
            )
        if prompt.scorer not in self._scorers:
            have = ", ".join(map(name_section, self._scorers))
            raise ConfigError(
                f"{name_section(prompt.scorer)}: prompts of the run name this scorer, but the config has only "
                f"{have}; add the section"
            )
        compares = self._scorers[prompt.scorer].compares_group
        responses = [
            Int32s.of([token for token, own in zip(one.tokens, one.loss_mask, strict=True) if own])
            for one in group.trajectories
        ]
        for place, (one, tokens) in enumerate(zip(group.trajectories, responses, strict=True)):
            if one.left_out:
                continue  # an unjudged response has no verdict that could be repeated
            peers = responses[:place] + responses[place + 1 :] if compares else ()
            request = ScoreRequest(tokens, prompt.reference, prompt.scorer, prompt.messages, peers, adapts=False)
            yield StoredVerdict(version, group.key, group.domain, one, request)

    async def _score_all(
        self,
        scorer: Scorer,
        serving: asyncio.Task[None],
        verdicts: Sequence[StoredVerdict],
        tell: Callable[[int], None],
    ) -> list[Score]:
        """Return the new scores of these responses; raise the error of `serving` if the scorer fails."""
        scoring = [asyncio.ensure_future(self._score(scorer, one.request)) for one in verdicts]
        try:
            while left := [one for one in scoring if not one.done()]:
                await asyncio.wait([serving, *left], timeout=TICK_SECONDS)
                if serving.done():
                    serving.result()
                tell(len(scoring) - len(left))
            return [one.result() for one in scoring]
        finally:
            for one in scoring:
                one.cancel()
            await asyncio.gather(*scoring, return_exceptions=True)

    async def _score(self, scorer: Scorer, request: ScoreRequest) -> Score:
        async def judge(request: ScoreRequest) -> Score:
            return await scorer.submit([request])[0]

        return await judge_repeatedly(judge, self._scorers[request.scorer].judge_tries)(request)


def _tell_from(progress: Progress, version: int, responses: int, first: int, scored: int) -> None:
    progress(version, responses, first + scored)
