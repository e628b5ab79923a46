"""Defines the contract of environments. An environment runs an episode from its prompt to its reward.

    prompt --> ( generate --> add )* --> judge, or a score computed by the environment

- An environment asks its episode for generations, each with stop strings and a token limit. An environment never sees
  engines, policy versions or seeds of generations; it draws random numbers from `Episode.seed`.
- The tokenizer, the renderer, the tools and the clock are in `Episode.ports`; `Episode.judge` and `Episode.score` call
  the scorer.
- Tokens that the environment adds are part of the response, but the policy is not trained on them.
- The run may stop an episode at any time; such an episode is unwanted. In an unwanted episode, `generate` and `judge`
  return None, other waits are cancelled, and the environment must return.
- After a crash, an episode is played again with the same seeds, so an environment must keep no state between episodes.
  An environment may store a snapshot after a turn; the episode then continues from the snapshot.

Environments run in the scheduler's event loop, thousands at a time, so an environment must await and never block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollflow.storage.errors import RollflowError
from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.limits import EpisodeLimits
from rollflow.tasks.environments.ports import EnvironmentPorts, Message
from rollflow.tasks.environments.tool_calls import Action
from rollflow.tasks.scorers.base import Score

# Computes the log-probs (nats) of tokens[1:] under a policy; returns None if there is no model.
LogProbs = Callable[[Sequence[int]], Awaitable[Sequence[float] | None]]


class SnapshotRejected(RollflowError):
    """Raised by an environment that cannot be restored from a snapshot. After this error, the episode starts again from
    the beginning, and the environment repeats its actions."""


class Episode(Protocol):
    """A response in progress. An environment generates and scores tokens with the methods of this object."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode."""

    @property
    def response(self) -> Sequence[int]:
        """All tokens of the response in the current branch, written by the policy or by the environment."""

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the response."""

    @property
    def limit(self) -> str:
        """A sentence that names the limit that the episode has reached; "" if another turn may follow.

        After a limit, `generate` returns None, but the environment may still score the reached state.
        """

    @property
    def id(self) -> str:
        """A text that identifies the episode in its run, and stays the same after a crash; "" in an evaluation.

        An outside service that gets the id and the turn number with each action can recognize a repeated action.
        """

    @property
    def turn_id(self) -> str:
        """A text that identifies the newest turn in its run, and stays the same after a crash; "" in an evaluation, and
        before the first turn. With this text, an environment can look up whether it has already acted on the turn.
        """

    @property
    def snapshot(self) -> bytes | None:
        """The environment's newest snapshot, if the episode continues after a crash; otherwise, and after the first
        generation, None.

        An episode with a snapshot already has all turns, tokens, rewards and branches from before the crash. The
        environment must restore its own state from the snapshot.
        """

    @property
    def keeps_snapshots(self) -> bool:
        """True if snapshots are stored; an evaluation stores none."""

    @property
    def is_recalled(self) -> bool:
        """True if the newest turn was generated before a crash. The environment may already have acted on a recalled
        turn."""

    @property
    def ports(self) -> EnvironmentPorts:
        """Tokenizer, renderer, tools and clock, which the run provides to the environment."""

    @property
    def seed(self) -> int:
        """A number with which an environment may seed its random generators.

        Every attempt at an episode has the same seed, but the episodes of one prompt have different seeds.
        """

    @property
    def attempt(self) -> int:
        """The number of times that the prompt was started before; the episodes of the earlier starts were discarded."""

    def save_snapshot(self, data: bytes) -> None:
        """Store a snapshot of the environment after a turn, so that the episode continues from here after a crash.

        The environment chooses the format of the bytes. A snapshot that is larger than `rollout.max_snapshot_bytes` is
        not stored. An environment raises `SnapshotRejected` if it cannot restore a stored snapshot.
        """

    def forget_turns(self, reason: str) -> None:
        """Let the policy generate all further turns, even those that it already generated before a crash.

        An environment that cannot repeat its actions calls `forget_turns` if there is no snapshot. `reason` is recorded
        if turns were generated before the crash.
        """

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        """Let the policy continue the response. The result is None if the episode is over or has reached a limit, or if
        the response has no room left.

        Args:
            stop: each of these strings ends the generation and stays in the response.
            max_tokens: the policy generates at most this number of tokens; the default is `room`.

        Raises:
            EngineFailed: generation failed `rollout.attempts` times, because no inference engine was alive.
        """

    def add(self, tokens: Sequence[int]) -> None:
        """Append at most `room` tokens to the response. The policy is not trained on these tokens."""

    def start_branch(self, tokens: Sequence[int]) -> None:
        """Continue with a rewritten context: the prompt, followed by `tokens` instead of the response so far.

        `start_branch` removes or changes tokens that the policy has read, for example to summarize a long history. The
        policy is trained once on each generated token, with the context in which it was generated. Each branch has the
        reward of the episode, and the branches together count as one episode.

        Raises:
            ValueError: there are more tokens than a response may have.
        """

    def take_role(self, name: str) -> None:
        """Let the policy act in this role until `take_role` is called again. One policy plays all roles of an
        episode.

        Each role has a context of its own: prompt (`replace_prompt`), response, room and branches. A new role begins
        with the prompt of the episode. `Score.roles` has the reward of each role; a role is compared only with the same
        role in other episodes of the prompt.

        Raises:
            ValueError: the name is empty or too long.
        """

    def extend(self, messages: Sequence[Message]) -> bool:
        """Append chat messages after the newest answer, so that the policy can answer again. If no room for an answer
        would be left, nothing changes and the result is False.

        Sampled tokens stay in the context. If the chat template changes earlier answers (some templates remove
        thoughts), a new branch begins with the changed conversation.

        Raises:
            ValueError: the policy has not answered since the last call.
        """

    async def extend_apart(self, messages: Sequence[Message]) -> bool:
        """Do the same as `extend`, in a thread if the messages are long, so that other episodes are not delayed."""

    def read_action(self, tokens: Sequence[int]) -> Action:
        """Read the tool calls in tokens of the response. For a malformed call, the action has a `fault`, and the newest
        turn gets the penalty `environment.unparsable_penalty`.
        """

    def reward(self, value: float) -> None:
        """Add a reward to the newest turn, in addition to the episode's score.

        The reward belongs to the last generated token of the turn.

        Raises:
            ValueError: there is no turn yet, or the value is not a finite number.
        """

    def enter_state(self, key: str) -> None:
        """Name the environment state in which the next turn acts.

        An objective can compare turns that acted in equal states. Only a hash of `key` is stored. A turn whose state
        has no name is compared with no other turn.
        """

    def replace_prompt(self, tokens: Sequence[int]) -> None:
        """Replace the tokens of the prompt by these tokens, for example to add tools or an observation.

        `room` shrinks by the number of added tokens. With several roles, only the prompt of the acting role is
        replaced.

        Raises:
            ValueError: the response has begun, or has no room left.
        """

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """End the generation of the episode and score these tokens with the prompt's scorer.

        The result is None if the episode is no longer wanted.
        """

    async def score(self, tokens: Sequence[int], reference: Mapping[str, Any] | None = None) -> Score:
        """Score these tokens with the prompt's scorer, without ending the episode.

        `reference` replaces the prompt's own reference answer.
        """


class Environment(Protocol):
    """The environment of a run, which plays all its episodes.

    `has_turns` is true if an episode may have several turns. `keeps_deadlines` is true if the environment itself
    enforces the limits on its computing time. `asks_at_once` is true if each episode begins with `generate()` without
    arguments.
    """

    has_turns: bool = True
    keeps_deadlines: bool = False
    asks_at_once: bool = False

    async def play(self, episode: Episode) -> Score | float | None:
        """Run an episode and return its score as a `Score` or a number, or None for an unwanted episode.

        If `play` returns None although the run needs the episode, the reward is 0.
        """

    async def measure(self, logprobs: LogProbs, ports: EnvironmentPorts) -> Mapping[str, float]:
        """Return additional measures of a policy by name, for the evaluations of the run.

        An environment overrides `measure` if it can compute a measure from the policy's probabilities. Without a model,
        `logprobs` returns None.
        """
        return {}


class ResettingEnvironment(Environment):
    """An environment that can be reset ahead: before the start of its episodes. The first state of an episode depends
    only on the prompt, so an episode is the same with and without a reset ahead.
    """

    @property
    def resets_ahead(self) -> int:
        """Largest number of episodes for which the environment is reset before they start."""
        raise NotImplementedError

    def reset_ahead(self, prompts: Sequence[Prompt], issued: Sequence[Prompt] = ()) -> None:
        """Begin a reset for one episode of each of these prompts, in this order, without waiting for the resets.

        Earlier resets are ended, unless they are for these episodes or for `issued` prompts, whose episodes start soon.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ChosenEnvironment:
    """The environment that plays the episodes of a prompt, with the limits of these episodes. `removal` says why the
    environment plays no more episodes; "" if it still plays episodes.
    """

    environment: Environment
    limits: EpisodeLimits
    removal: str = ""


class EnvironmentChoice(Environment):
    """Several environments. Each prompt is played in one of them."""

    def choose(self, prompt: Prompt) -> ChosenEnvironment:
        """Return the environment that plays a prompt.

        Raises:
            ConfigError: the prompt names no environment.
        """
        raise NotImplementedError


def find_player(
    environment: Environment, prompt: Prompt, ports: EnvironmentPorts
) -> tuple[Environment, EnvironmentPorts]:
    """Return the environment that plays a prompt, and the ports with the limits of its episodes."""
    if not isinstance(environment, EnvironmentChoice):
        return environment, ports
    chosen = environment.choose(prompt)
    return chosen.environment, replace(ports, limits=chosen.limits)


def find_removal(environment: Environment, prompt: Prompt) -> str:
    """Return why the environment of a prompt plays no more episodes; "" if it still plays episodes."""
    return environment.choose(prompt).removal if isinstance(environment, EnvironmentChoice) else ""


def charge_unparsable(episode: Episode) -> None:
    """Subtract the penalty for an unreadable action from the reward of the newest turn."""
    if penalty := episode.ports.limits.unparsable_penalty:
        episode.reward(-penalty)
