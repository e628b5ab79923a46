"""Defines the episode in progress, through which an environment requests generations and rewards."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Branch, Outcome, Prompt, StopReason, Trajectory
from rollflow.storage.token_arrays import ANY_TOKEN, Bools, Float32s, Int32s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.base import Environment, charge_unparsable, find_player
from rollflow.tasks.environments.conversation import BEGUN, Conversation, Extension, RoleContext
from rollflow.tasks.environments.limits import NO_CLOCK, StepClock, TurnClock, check_stops
from rollflow.tasks.environments.ports import NO_PORTS, EnvironmentPorts, Message
from rollflow.tasks.environments.tool_calls import Action, parse_action
from rollflow.tasks.environments.turns import LivedBranch, LivedEpisode, check_tokens, find_parent
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.scorers.base import Score, ScoreRequest, check_number
from rollflow.tasks.scorers.token_values import align_values

NO_REWARD = Score(0.0, "the episode ended without a reward", Outcome.WRONG)
NO_ROLES: Mapping[str, RoleContext] = {}
# Waits for the other final responses of the group, and returns them; returns None if the group was given up.
Meeting = Callable[[Sequence[int]], Awaitable[Sequence[Sequence[int]] | None]]


class Turn(NamedTuple):
    """A request of an environment for one generation by the policy, with its context, token limit and stop strings."""

    number: int
    prompt: ModelInput
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    episode: str = ""  # id of the episode
    sample: int = 0  # number of the episode in its group
    seed: int = 0  # seed of the episode


@dataclass(eq=False, slots=True)
class PlayedEpisode:
    """An episode in progress: one conversation of the policy with its environment, with the tokens so far.

    `ask` requests a generation; `ask` returns None if the episode is no longer wanted. `closed` is called exactly once
    for each episode, even if the episode generates nothing. The return value of `closed` says whether the episode is
    kept. `scorer` computes the reward.

    The environment of an episode either runs or waits for the answer to a request. `let_go` stops an unwanted episode;
    it cancels the environment only while the environment runs.
    """

    prompt: Prompt
    longest: int  # largest number of tokens that the response may have
    ask: Callable[[Turn], Awaitable[VersionedGeneration | None]]
    closed: Callable[[PlayedEpisode], Awaitable[bool]]
    scorer: Callable[[ScoreRequest], Awaitable[Score]]
    vocabulary: int = ANY_TOKEN  # size of the policy's vocabulary
    ports: EnvironmentPorts = NO_PORTS
    meet: Meeting | None = None  # for a scorer that compares the responses to the same prompt
    id: str = ""
    sample: int = 0  # number of the episode in its group
    is_recalled: bool = False  # as `Episode.is_recalled` specifies
    seed: int = 0  # number from which the environment draws its random numbers
    attempt: int = 0  # how often the prompt was started before
    snapshot: bytes | None = None  # as `Episode.snapshot` specifies
    keeps_snapshots: bool = False  # as `Episode.keeps_snapshots` specifies
    lived: LivedEpisode = field(default_factory=LivedEpisode)
    has_turns: bool = False  # True if the environment may have several turns
    turns: int = 0
    generated: int = 0  # number of tokens that the policy generated
    first: VersionedGeneration | None = None
    ending: StopReason = StopReason.STOP
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    at: float = 0.0  # time at which generation ended
    wanted: bool | None = None  # True if the episode is kept; None until generation has ended
    unjudged: Score | None = None  # the last score that says that the scorer could not judge a response
    _leader: asyncio.Task[Any] | None = None  # the task that runs the environment
    _asked: bool = False  # True while the environment waits for a generation
    _gone: bool = False  # True after `let_go`
    _interrupted: bool = False  # True if the environment was cancelled while computing
    _clock: StepClock = NO_CLOCK  # measures how long the environment computes
    _late: Score | None = None  # the score of an episode whose environment computed for too long
    _limit: str = ""  # why the episode gets no further turn
    _talk: Conversation = BEGUN
    # contexts of the roles that do not act now, by role
    _roles: Mapping[str, RoleContext] = field(default_factory=lambda: NO_ROLES)

    @property
    def made(self) -> TokenSpan:
        """The tokens after the prompt in the current branch, with their log-probs and policy versions."""
        return self.lived.current.made

    @property
    def limit(self) -> str:
        """The limit that the episode has reached, as `Episode.limit` specifies."""
        return self.ports.limits.find_reached(self.turns, self.generated)

    @property
    def turn_id(self) -> str:
        """A text that identifies the newest turn, as `Episode.turn_id` specifies."""
        return f"{self.id}.{self.turns - 1}" if self.id and self.turns else ""

    @property
    def response(self) -> Int32s:
        """The tokens after the prompt, as `Episode.response` specifies."""
        return self.made.tokens

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the response."""
        return self.longest - self.lived.current.length

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        """Let the policy continue the response, as `Episode.generate` specifies."""
        if self.wanted is not None or self.room <= 0 or self._reaches_limit():
            return None
        turn = self._build_turn(check_stops(stop) if stop != () else (), max_tokens)
        self._wait()
        try:
            started = None if self._gone else await self.ask(turn)
            if started is not None:
                self._append_generation(started)
                if self.ending is not StopReason.ABORTED and not self._gone:
                    return started.generation
            await self.abandon()
        finally:
            self._go_on(turn_ended=True)
        return None

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not generate, as `Episode.add` specifies."""
        given = self._check_tokens(tokens)
        count = len(given)
        if count > self.room:
            raise ValueError(f"{count} tokens do not fit into the response, which has room for {self.room} tokens")
        self.lived.current.add_given(given)

    def start_branch(self, tokens: Sequence[int]) -> None:
        """Continue with a rewritten context, as `Episode.start_branch` specifies."""
        given = self._check_tokens(tokens)
        if len(given) > self.longest:
            raise ValueError(f"a branch of {len(given)} tokens does not fit into a response of {self.longest} tokens")
        self.lived.start_branch(given)
        self._talk = Conversation(begun=len(given), is_known=False)

    def extend(self, messages: Sequence[Message]) -> bool:
        """Let chat messages follow the newest answer, as `Episode.extend` specifies."""
        found = self._talk.extend(self.ports.renderer, self.prompt, self.response, messages)
        return self._apply_extension(messages, *found)

    async def extend_apart(self, messages: Sequence[Message]) -> bool:
        """Add messages like `extend`, but tokenize long messages in another thread; see `Episode.extend_apart`."""
        found = await self._talk.extend_apart(self.ports.renderer, self.prompt, self.response, messages)
        return self._apply_extension(messages, *found)

    def _apply_extension(self, messages: Sequence[Message], talk: Conversation, found: Extension) -> bool:
        """Append the tokens of new messages, or begin a branch with them; return False if they leave no room."""
        if len(found.tokens) >= (self.longest if found.branches else self.room):
            return False
        (self.start_branch if found.branches else self.add)(found.tokens)
        self._talk = talk.add_messages(messages, len(self.response), branches=found.branches)
        return True

    def take_role(self, name: str) -> None:
        """Let the policy act in a role, as `Episode.take_role` specifies."""
        before = self.lived.role
        self.lived.take_role(name)
        self._roles = {**self._roles, before: RoleContext(self.prompt, self.longest, self._talk)}
        self.prompt, self.longest, self._talk = self._roles.get(name) or self._roles[""]._replace(talk=BEGUN)

    def read_action(self, tokens: Sequence[int]) -> Action:
        """Read the tool calls in tokens of the response, as `Episode.read_action` specifies."""
        action = parse_action(self.ports.tokenizer.decode_response(tokens))
        if action.fault:
            charge_unparsable(self)
        return action

    def reward(self, value: float) -> None:
        """Give the newest turn a reward, as `Episode.reward` specifies."""
        self.lived.add_reward(check_number("the reward of a turn", value))

    def enter_state(self, key: str) -> None:
        """Name the environment state of the next turn, as `Episode.enter_state` specifies."""
        self.lived.enter_state(key)

    def save_snapshot(self, data: bytes) -> None:
        """Store a snapshot of the environment, as `Episode.save_snapshot` specifies."""
        if not isinstance(data, bytes):
            raise TypeError(f"a snapshot must be bytes, not a {type(data).__name__}")

    def forget_turns(self, reason: str) -> None:
        """Do nothing, because no turn of this episode was generated before a crash."""

    def replace_prompt(self, tokens: Sequence[int]) -> None:
        """Begin the episode with these tokens instead of the prompt's tokens, as `Episode.replace_prompt` specifies."""
        given = self._check_tokens(tokens)
        grown = len(given) - self.prompt.input.length
        if not self.lived.is_fresh or grown >= self.room:
            used = self.lived.current.length
            raise ValueError(f"the prompt cannot grow by {grown} tokens, as {used} of {self.longest} are used")
        self.longest -= max(0, grown)
        self.prompt = replace(self.prompt, input=ModelInput.of(given))

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """End generation and score tokens with the prompt's scorer, as `Episode.judge` specifies."""
        self._wait()
        try:
            if not await self._close():
                return None
            peers = await self.meet(self._check_tokens(tokens)) if self.meet is not None else ()
            return None if peers is None else await self._score(tokens, self.prompt.reference, peers)
        finally:
            self._go_on()

    async def score(self, tokens: Sequence[int], reference: Mapping[str, Any] | None = None) -> Score:
        """Score tokens with the prompt's scorer, as `Episode.score` specifies."""
        self._clock.pause()
        try:
            return await self._score(tokens, self.prompt.reference if reference is None else reference)
        finally:
            self._clock.go_on()

    async def _score(
        self, tokens: Sequence[int], reference: Mapping[str, Any], peers: Sequence[Sequence[int]] = ()
    ) -> Score:
        checked, prompt = self._check_tokens(tokens), self.prompt
        score = await self.scorer(ScoreRequest(checked, reference, prompt.scorer, prompt.messages, peers))
        if score.outcome is Outcome.UNJUDGED:
            self.unjudged = score
        return align_values(score, checked, self.response) if score.has_token_values else score

    def find_unjudged(self, score: Score) -> Score | None:
        """Return `score` if it is unjudged; otherwise return the last unjudged score of the episode, or None."""
        return score if score.outcome is Outcome.UNJUDGED else self.unjudged

    def let_go(self) -> None:
        """Stop the environment of an episode that is no longer wanted.

        A running environment is cancelled; an environment that waits for a generation gets None.
        """
        if self.wanted or self._gone:
            return
        self._gone = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Cancel the environment if it is computing; a second call does nothing."""
        if self._leader is not None and not self._asked and not self._interrupted:
            self._interrupted = True
            self._leader.cancel()

    def _expire(self, reason: str) -> None:
        """Stop an environment that computed for too long: a timeout if the policy has acted, else no verdict."""
        if not self._gone:
            self._late = Score(0.0, reason, Outcome.TIMEOUT if self.turns else Outcome.UNJUDGED)
            self._interrupt()

    def _reaches_limit(self) -> bool:
        """Return whether the episode gets no further turn, and record the reason."""
        self._limit = self.limit
        return bool(self._limit) or self._late is not None

    def _wait(self) -> None:
        """Record that the environment waits for the policy or for the scorer."""
        self._asked = True
        self._clock.pause()

    def _go_on(self, *, turn_ended: bool = False) -> None:
        """Record that the environment continues to compute."""
        self._asked = False
        self._clock.go_on(turn_ended=turn_ended)

    async def abandon(self) -> None:
        """End the episode early, and count the tokens generated so far."""
        self.ending = StopReason.ABORTED
        await self._close()

    async def play(self, environment: Environment) -> Score | None:
        """Run the episode in `environment` and return its reward; return None if the episode is no longer wanted."""
        environment, self.ports = find_player(environment, self.prompt, self.ports)
        self.has_turns = environment.has_turns
        leader = self._leader = asyncio.current_task()
        assert leader is not None
        if self.ports.limits.has_deadline and not environment.keeps_deadlines:
            self._clock = TurnClock(self.ports.limits, self._expire)
            self._clock.go_on()
        score: Score | float | None = None
        try:
            score = await environment.play(self)
        except asyncio.CancelledError:
            if not self._interrupted or leader.cancelling() > 1:
                raise  # only `let_go` and `_expire` cancel a single episode; other cancellations end the whole run
            if self._gone:
                self.ending = StopReason.ABORTED
        finally:
            self._leader = None
            self._clock.pause()
            if self._interrupted:
                leader.uncancel()
        if not await self._close():
            return None
        if self._late is not None:
            return self._late
        if score is None:
            return Score(0.0, self._limit, Outcome.WRONG) if self._limit else NO_REWARD
        return score if isinstance(score, Score) else Score(score)

    def trajectories(
        self, score: Score, sample: int = 0, responses: int = 1, staleness_from: str = "started"
    ) -> tuple[Trajectory, ...]:
        """Build the trajectories that the learner trains on, one trajectory per branch of the episode.

        The first trajectory has the number `sample`; each further trajectory has a number that is larger by
        `responses`, the number of episodes of the prompt.

        Raises:
            ConfigError: the environment never asked the policy for a generation.
        """
        if self.first is None:
            raise ConfigError(
                "the environment ended an episode in which the policy generated nothing; let it ask for at least "
                "one generation in each episode"
            )
        found = list[Trajectory]()
        for number, branch in enumerate(self.lived.played):
            oldest = staleness_from == "oldest-token"
            started = branch.find_oldest(self.first.version) if oldest else self.first.version
            one = self._build_trajectory(branch, score, sample + number * responses, started)
            if found:
                parent, shared = find_parent(Int32s.of(one.tokens), [Int32s.of(other.tokens) for other in found])
                one = replace(one, branch=Branch(found[parent].sample, shared))
            found.append(one)
        return tuple(found)

    def _build_trajectory(self, branch: LivedBranch, score: Score, sample: int, started_version: int) -> Trajectory:
        acts, made = branch.role == self.lived.role, branch.made
        prompt = (self.prompt if acts else self._roles[branch.role].prompt).input
        given, rewards = prompt.length, self._place_rewards(branch, score)
        return Trajectory(
            sample=sample,
            started_version=started_version,
            tokens=prompt.flat + made.tokens,
            loss_mask=Bools(bytes(given) + branch.mask),
            logprobs=Float32s.same(0.0, given) + made.logprobs,
            versions=Int32s.same(-1, given) + made.versions,
            reward=score.roles.get(branch.role, score.value),
            reason=score.reason,
            ending=StopReason(branch.ending),
            generation_seconds=self.at - self.began,
            reward_seconds=asyncio.get_running_loop().time() - self.at,
            reward_parts=dict(score.parts) or None,
            outcome=score.outcome,
            foreign_parts=prompt.placed or None,
            scorer_version=score.version or None,
            token_rewards=None if rewards is None else Float32s.same(math.nan, given) + rewards,
            turn_starts=branch.find_starts(given) if self.has_turns else None,
            turn_states=branch.find_states() if self.has_turns else None,
            role=branch.role or None,
        )

    def _place_rewards(self, branch: LivedBranch, score: Score) -> Float32s | None:
        """Return the rewards of the tokens of a branch. A score's values per token belong to the newest branch."""
        has_values = score.has_token_values and branch is self.lived.current
        return branch.place_rewards(Float32s.of(score.token_values) if has_values else None)  # type: ignore[arg-type]

    def _build_turn(self, stop: tuple[str, ...], max_tokens: int | None) -> Turn:
        max_tokens = None if max_tokens is None else operator.index(max_tokens)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}, but a generation has at least one token; give 1 or more")
        room = self.room
        longest = min(self.ports.limits.bound_turn(room, self.generated), max_tokens or room)
        context = self.lived.current.follow(self.prompt.input)
        return Turn(self.turns, context, longest, stop, self.id, self.sample, self.seed)

    def _append_generation(self, started: VersionedGeneration) -> None:
        generation = started.generation
        self.lived.add_generation(generation)
        self.first = self.first or started
        self.is_recalled = started.is_recalled
        self.turns += 1
        self.generated += len(generation.made)
        self.ending = generation.ending

    def _check_tokens(self, tokens: Sequence[int]) -> Int32s:
        """Convert tokens from an environment; reject token ids outside the vocabulary, which could crash an engine."""
        if isinstance(tokens, Int32s) and self.lived.current.ends_with(tokens):
            return tokens
        return check_tokens(tokens, self.vocabulary)

    async def _close(self) -> bool:
        """End generation and return whether the episode is kept."""
        if self.wanted is None:
            self.at = asyncio.get_running_loop().time()
            self.wanted = await self.closed(self)
        return self.wanted
