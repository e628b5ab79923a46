"""Runs one attempt to answer a prompt, which returns a scored group of responses or the reason why it was discarded.

    prompt --> G (+ extra) x ( queue --> engine --> scorer )  --> TrajectoryGroup
               = an episode, run by the environment         `-----> Discard: it was given up

- The episodes of an attempt run independently, and a response is scored as soon as it ends.
- If the engine of a request fails and no other engine is left, the request is sent again later with the same seed; the
  other responses of the group are kept.
- If more than `group_size` responses are started, the first `group_size` responses that end are kept, and the others
  are aborted.
- If nobody can judge a response, the response is left out of its group, or the attempt is given up, as the config says.
  A reward of 0 would train the policy on a failure that the policy did not cause. An attempt that is given up returns a
  `Discard` with the number of generated tokens.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import (
    LONGEST_WHY,
    Discard,
    DiscardReason,
    GroupKey,
    Outcome,
    Prompt,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    UnjudgedResponse,
)
from rollflow.storage.run_records.finished_turns import TurnKey
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.environments.base import Environment, SnapshotRejected, find_removal
from rollflow.tasks.environments.ports import NO_PORTS, EnvironmentPorts
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.judging import Outages, ScoreQueue, judge_repeatedly
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.peers import GroupPeers
from rollflow.tasks.rollout.prompt_spans import PromptSpans
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, VersionedGeneration
from rollflow.tasks.rollout.resuming.journal import TurnJournal
from rollflow.tasks.rollout.resuming.recorded_episode import EpisodePlace, RecordedEpisode, hash_basis
from rollflow.tasks.runtime.spans import Spans
from rollflow.tasks.scorers.base import Score, ScoreRequest, make_storable


@dataclass(frozen=True, slots=True)
class GroupPorts:
    """The objects and callbacks that the rollout of one prompt uses.

    `generated` is awaited after each finished response; it can delay the scoring of the response.
    """

    limits: RolloutLimits
    proxy: InferenceProxy
    score: Callable[[ScoreRequest], Awaitable[Score]]
    generated: Callable[[int], Awaitable[None]]  # called with the number of tokens of each finished response
    started: Callable[[GroupRollout, int], None]  # called whenever the value of `started_version` changes
    environment: Environment = SINGLE_TURN
    vocabulary: int = ANY_TOKEN  # size of the policy's vocabulary
    environment_ports: EnvironmentPorts = NO_PORTS
    spans: PromptSpans = field(default_factory=lambda: PromptSpans(Spans()))
    scoring: ScoreQueue = field(default_factory=ScoreQueue)  # counts the responses that wait for a score
    journal: TurnJournal = field(default_factory=TurnJournal)  # stores finished turns
    outages: Outages = field(default_factory=Outages)  # counts the consecutive groups that no scorer could judge


class EpisodeCalls(NamedTuple):
    """The functions that all episodes of a group call."""

    ask: Callable[[Turn], Awaitable[VersionedGeneration | None]]
    closed: Callable[[PlayedEpisode], Awaitable[bool]]
    scorer: Callable[[ScoreRequest], Awaitable[Score]]


@dataclass(eq=False, slots=True)
class GroupRollout:
    """One attempt to answer a prompt with a group of responses."""

    key: GroupKey
    ports: GroupPorts
    responses: int  # number of responses to generate, of which `group_size` are kept
    number: int  # number of this group of responses, counting all groups that the scheduler started
    awaited: bool = field(kw_only=True)  # True if a batch waits for this group of responses
    # number of earlier batches with this prompt that led to NaN or infinite weights
    redraws: int = field(default=0, kw_only=True)
    # the unjudged response because of which the group was given up, with the reason
    unjudged: UnjudgedResponse | None = field(default=None, kw_only=True)
    _peers: GroupPeers | None = None  # for a scorer that compares the responses of a group
    _over: asyncio.Event | None = None  # set once the group is given up; created when a caller needs it
    unanswered: int = field(init=False)  # number of the group's episodes in which the policy still generates tokens
    _reason: DiscardReason | None = None
    _given: int = 0  # number of tokens of the prompt
    _playing: list[PlayedEpisode] = field(default_factory=list)
    # sample -> policy version under which the request for the sample started
    _starts: dict[int, int] = field(default_factory=dict)
    _requests: dict[int, str] = field(default_factory=dict)  # sample -> id of its newest request
    # sample -> number of times that a request for the sample failed
    _tries: dict[int, int] = field(default_factory=dict)
    _oldest: int | None = None
    _ended: int = 0  # number of responses of the group that ended without an abort
    _tokens: int = 0  # number of tokens of all responses
    _surplus: int = 0  # number of tokens of the group's responses that are not kept
    _left_out: int = 0  # number of responses of the group that could not be judged
    _later: RequestOptions = field(init=False)  # options of all turns except the first
    _first: RequestOptions = field(init=False)  # options of first turns

    def __post_init__(self) -> None:
        self.unanswered = self.responses
        self._later = self._first = RequestOptions(self.key.prompt, self.key)

    @property
    def started_version(self) -> int | None:
        """Oldest policy version under which one of the group's requests started; None before the first start."""
        return self._oldest

    async def give_up(self, reason: DiscardReason) -> None:
        """Abort the running requests of the group of responses, so that `run` returns a `Discard` with `reason`."""
        self._reason = self._reason or reason
        if self._over is not None:
            self._over.set()
        if self._peers is not None:
            self._peers.cancel()
        await self._abort()

    async def _abort(self) -> None:
        """End all episodes of the group and abort their running requests."""
        for episode in self._playing:
            episode.let_go()
        await self.ports.proxy.abort([id for _, id in sorted(self._requests.items())])

    def _build_id(self, turn: Turn) -> str:
        """Build a request id that is unique for each turn and try, because an engine may still use the previous id."""
        id = f"{turn.episode}.{turn.number}" if turn.number else turn.episode
        return id + "'" * self._tries.get(turn.sample, 0)

    async def run(self, prompt: Prompt) -> TrajectoryGroup | Discard:
        """Generate and score responses until `group_size` responses are kept or the group is given up.

        Raises:
            EngineFailed: a generation request failed `RolloutLimits.attempts` times because no engine was left.
        """
        if self.ports.limits.judging_of(prompt.scorer).compares_group:
            self._peers = GroupPeers(self.ports.limits.group_size)
        self._given = prompt.input.length
        calls = EpisodeCalls(self._generate_turn, self._close_episode, self._judge)
        asks_at_once = self.ports.environment.asks_at_once and self.ports.journal.is_empty
        self._first = self._later._replace(on_start=self._note_start)
        async with asyncio.TaskGroup() as samples:
            lives = (
                self._generate_and_play(prompt, one, calls) if asks_at_once else self._play(prompt, one, calls)
                for one in range(self.responses)
            )
            # a common name takes less memory than the names that asyncio makes
            tasks = [samples.create_task(life, name="sample") for life in lives]
        self._first = self._later  # breaks a reference cycle
        trajectories = [one for task in tasks for one in task.result()]
        if self._reason is not None:
            started = self.ports.proxy.version if self._oldest is None else self._oldest
            return Discard(self.key, self._reason, started, self._tokens)
        return TrajectoryGroup(self.key, prompt.id, prompt.domain, tuple(trajectories), surplus_tokens=self._surplus)

    async def _generate_and_play(self, prompt: Prompt, sample: int, calls: EpisodeCalls) -> Sequence[Trajectory]:
        """Generate the first turn of an episode, then run the episode as `_play` does. While the first turn is
        generated, the episode takes no memory besides its request.
        """
        began = asyncio.get_running_loop().time()
        first: VersionedGeneration | None = None
        while first is None and self._reason is None:
            try:
                first = await self.ports.proxy.generate(*self._build_first_request(prompt, sample))
            except EngineFailed:
                self._count_failure(sample)
        return await self._play(prompt, sample, calls._replace(ask=functools.partial(_return_turn, first)), began)

    async def _play(
        self, prompt: Prompt, sample: int, calls: EpisodeCalls, began: float | None = None
    ) -> Sequence[Trajectory]:
        """Run one episode until its reward is known, and return the trajectory of each of its branches; return nothing
        if the episode is not kept.

        If the first turn is already generated, `began` is the time at which its generation began.
        """
        ports = self.ports
        for restores in (True, False):
            episode = self._build_episode(prompt, sample, calls)
            if began is not None:
                episode.began = began
            elif self._reason is not None:
                await episode.abandon()
                return ()
            self._playing.append(episode)
            try:
                if restores:
                    self._restore_episode(episode)
                score = await episode.play(ports.environment)
                break
            except SnapshotRejected as rejected:
                ports.journal.note_restart(TurnKey(self.key, sample, 0), f"the snapshot was rejected: {rejected}")
            finally:
                self._playing.remove(episode)
                if episode.wanted and self._peers is not None:
                    self._peers.leave(sample)
        if score is None:
            return ()
        # With `judge_tries = 0`, an unjudged response has reward 0. An episode whose environment failed has no reward.
        is_broken = episode.first is None or episode.unjudged is None
        judges_again = is_broken or ports.limits.judge_tries(prompt.scorer)
        if unjudged := episode.find_unjudged(score) if judges_again else None:
            if not self._leave_out(episode, unjudged):
                if find_removal(ports.environment, prompt):  # another prompt replaces this one
                    await self.give_up(DiscardReason.FILTERED)
                    return ()
                await ports.outages.pause(prompt.scorer, self._find_end())
                await self.give_up(DiscardReason.UNJUDGED)
                return ()
            score = Score(math.nan, unjudged.reason, Outcome.UNJUDGED, version=unjudged.version)
        trajectories = episode.trajectories(score, sample, self.responses, self.ports.limits.staleness_from)
        if unjudged:
            trajectories = tuple(replace(one, left_out=True) for one in trajectories)
        self.ports.spans.respond(self.key, trajectories[0])
        return trajectories

    def _leave_out(self, episode: PlayedEpisode, unjudged: Score) -> bool:
        """Return True if an unjudged response is left out of its group; else record why the group is discarded."""
        limits, why = self.ports.limits, unjudged.reason
        self._left_out += 1
        judged = limits.group_size - self._left_out
        if not limits.judging_of(episode.prompt.scorer).leaves_out:
            pass
        elif episode.first is None:
            why = f"the policy sampled no token of the response: {why}"
        elif judged < limits.least_judged:
            why = f"at most {judged} of {limits.group_size} responses can be judged: {why}"
        else:
            return True
        self.unjudged = self.unjudged or UnjudgedResponse(*self.key, episode.sample, make_storable(why, LONGEST_WHY))
        return False

    def _build_episode(self, prompt: Prompt, sample: int, calls: EpisodeCalls) -> PlayedEpisode:
        """Create an episode of the prompt; its history is recorded if the journal stores turns."""
        ports = self.ports
        seed = sample_seed(ports.limits.seed, self.key.prompt, sample, redraws=self.redraws)
        build: Callable[..., PlayedEpisode] = PlayedEpisode
        if ports.journal.is_on:
            basis = hash_basis(prompt, ports.limits, ports.environment_ports.limits, seed)
            build = functools.partial(RecordedEpisode, place=EpisodePlace(ports.journal, self.key, sample, basis))
        return build(
            prompt,
            ports.limits.max_new_tokens,
            *calls,
            ports.vocabulary,
            ports.environment_ports,
            functools.partial(self._peers.arrive, sample) if self._peers is not None else None,
            id=self._name_episode(sample),
            sample=sample,
            seed=seed,
            attempt=self.key.attempt,
        )

    def _restore_episode(self, episode: PlayedEpisode) -> None:
        """Let an episode continue from the newest stored snapshot of its environment, if there is a snapshot.

        Raises:
            SnapshotRejected: the history before the snapshot does not fit the episode.
        """
        if not isinstance(episode, RecordedEpisode):
            return
        place, journal = episode.place, self.ports.journal
        if (point := journal.find_restore_point(self.key, place.sample, place.basis)) is not None:
            episode.restore(point)
            journal.restored += 1
            if episode.first is not None:
                self._note_start(place.sample, episode.first.version)

    async def _generate_turn(self, turn: Turn) -> VersionedGeneration | None:
        """Generate one turn of an episode; the policy version of the first turn determines the episode's staleness."""
        while self._reason is None:
            request, asked = self._build_request(turn)
            try:
                if self.ports.journal.is_empty:
                    return await self.ports.proxy.generate(request, asked)
                return await self._recall_or_generate(request, asked, TurnKey(self.key, turn.sample, turn.number))
            except EngineFailed:
                self._count_failure(turn.sample)
        return None

    def _build_first_request(self, prompt: Prompt, sample: int) -> tuple[GenerationRequest, RequestOptions]:
        """Build the request for the first turn of an episode that does not exist yet."""
        limits, bounds = self.ports.limits, self.ports.environment_ports.limits
        seed = sample_seed(limits.seed, self.key.prompt, sample, redraws=self.redraws)
        longest = bounds.bound_turn(limits.max_new_tokens, 0)
        return self._build_request(Turn(0, prompt.input, longest, (), self._name_episode(sample), sample, seed))

    def _build_request(self, turn: Turn) -> tuple[GenerationRequest, RequestOptions]:
        """Build the request for a turn of an episode, with a new id for each try."""
        limits, sample, asked, seed = self.ports.limits, turn.sample, self._later, turn.seed
        if turn.number:
            seed = sample_seed(limits.seed, self.key.prompt, sample, turn.number, self.redraws)
        else:
            asked = self._first._replace(sample=sample)
        self._requests[sample] = id = self._build_id(turn)
        request = GenerationRequest(
            id,
            turn.prompt,
            turn.max_new_tokens,
            limits.temperature,
            seed,
            stop=turn.stop,
            episode=turn.episode if self.ports.environment.has_turns else "",
            earlier=max(0, turn.prompt.length - self._given),  # a role's prompt may be shorter than the group's prompt
        )
        return request, asked

    def _name_episode(self, sample: int) -> str:
        return f"{self.key.prompt}.{self.key.attempt}.{sample}"

    def _judge(self, request: ScoreRequest) -> Awaitable[Score]:
        """Score a response, with repeated tries; meanwhile, the response counts as unscored."""
        ports = self.ports
        judge, tries = ports.score, ports.limits.judge_tries(request.scorer)
        if tries > 1:
            judge = judge_repeatedly(judge, tries, self._find_end())
        return ports.scoring.count(judge)(request)

    def _find_end(self) -> asyncio.Event:
        """Return the event that is set as soon as the group of responses is given up."""
        if self._over is None:
            self._over = asyncio.Event()
            if self._reason is not None:
                self._over.set()
        return self._over

    async def _recall_or_generate(
        self, request: GenerationRequest, asked: RequestOptions, key: TurnKey
    ) -> VersionedGeneration:
        """Return the turn that an earlier scheduler stored, or generate the turn and record it in the journal."""
        journal = self.ports.journal
        if (stored := journal.recall(key, request)) is not None:
            if asked.on_start:
                asked.on_start(asked.sample, stored.version)
            return stored
        made = await self.ports.proxy.generate(request, asked)
        await journal.record(key, request, made)
        return made

    def _count_failure(self, sample: int) -> None:
        """Count a failed try of a request; after the last allowed try, raise the error again."""
        self._tries[sample] = self._tries.get(sample, 0) + 1
        if self.ports.proxy.version < 0 or self._tries[sample] == self.ports.limits.attempts:
            raise

    def _note_start(self, sample: int, version: int) -> None:
        self._starts[sample] = version
        oldest = min(self._starts.values())
        if oldest != self._oldest:
            self._oldest = oldest
            self.ports.started(self, oldest)

    async def _close_episode(self, episode: PlayedEpisode) -> bool:
        """Record that the policy generates no more tokens in this episode; return whether the episode is kept."""
        self.unanswered -= 1
        self.ports.proxy.end_episode(episode.id)
        await self.ports.generated(episode.generated)
        self._tokens += episode.generated
        if episode.ending is StopReason.ABORTED or self._ended == self.ports.limits.group_size:
            self._surplus += episode.generated
            return False
        self._ended += 1
        if self._ended == self.ports.limits.group_size < self.responses:  # the group is complete
            await self._abort()
        return self._reason is None


async def _return_turn(made: VersionedGeneration | None, turn: Turn) -> VersionedGeneration | None:
    """Return a turn that is already generated, in place of a generation."""
    return made


def sample_seed(seed: int, prompt: int, sample: int, turn: int = 0, redraws: int = 0) -> int:
    """Compute the 63-bit seed of one generation.

    Every attempt to answer the same prompt uses the same seed, so that a long response is not replaced by a shorter
    one. `redraws` counts the prompt's batches that led to NaN or infinite weights; a new value leads to a new seed.
    """
    text = f"{seed}:{prompt}:{sample}" + (f":{turn}" if turn else "") + (f"/{redraws}" if redraws else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
