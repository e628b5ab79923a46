"""Defines the contract of environments. An environment runs an episode, from its prompt to its reward.

    prompt --> ( generate --> add )* --> judge, or a score computed by the environment

- An environment asks its episode to generate tokens, with stop strings and a token limit for each call. An environment
  never sees engines, policy versions or seeds of generations. It draws its own random numbers from `Episode.seed`.
- An environment gets the run's tokenizer, renderer, tools and clock as `Episode.ports`. An environment calls the run's
  scorer through `Episode.judge` and `Episode.score`.
- Tokens added by the environment are appended to the response. The policy is not trained on tokens that the environment
  added.
- The run may stop an episode at any time, because the episode is no longer wanted. Once an episode is no longer wanted,
  `generate` and `judge` return None, and the environment must return. If the environment awaits something else, the
  environment's task is cancelled. The environment need not clean up the episode, because the generated tokens are
  counted in any case.
- After a crash, the run plays an episode again with the same seeds, so an environment keeps no state between episodes.
  An environment may store a snapshot after a turn. Then the episode continues from there (`Episode.snapshot`).

Environments run in the scheduler's event loop, thousands at a time: an environment must await and never block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from rollflow.storage.errors import RollflowError
from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.ports import EnvironmentPorts, Message
from rollflow.tasks.environments.tool_calls import Action
from rollflow.tasks.scorers.base import Score

# Computes the log-probs (nats) of tokens[1:] under a policy, each given the tokens before it.
# Returns None if there is no model.
LogProbs = Callable[[Sequence[int]], Awaitable[Sequence[float] | None]]


class SnapshotRejected(RollflowError):
    """Raised by an environment that cannot be restored from a snapshot. The episode then begins anew, and the
    environment repeats its actions."""


class Episode(Protocol):
    """One response in progress. An environment uses an `Episode` to generate tokens and to score them."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode."""

    @property
    def response(self) -> Sequence[int]:
        """All tokens of the response in the current branch. Both the policy and the environment add tokens."""

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the response."""

    @property
    def limit(self) -> str:
        """A sentence that names the limit that the episode has reached; "" if another turn may follow.

        Once the episode has reached a limit, `generate` returns None. The environment may still score the state that
        the episode has reached.
        """

    @property
    def id(self) -> str:
        """A text that identifies the episode in its run; "" in an evaluation. A crash of the run does not change the
        id.

        An environment may send actions to an outside service. If the environment sends the id and the turn's number
        with each action, the service can recognize an action that it has already done.
        """

    @property
    def turn_id(self) -> str:
        """A text that identifies the newest turn in its run; "" in an evaluation, and before the first turn. A crash of
        the run does not change the text, so an environment can look up whether it has already acted on this turn."""

    @property
    def snapshot(self) -> bytes | None:
        """The environment's newest snapshot, if the episode continues after a crash; None after the first generation.

        If there is a snapshot, the episode already contains all turns, tokens, rewards and branches that it contained
        when the snapshot was stored. The environment must restore its state from the snapshot instead of beginning the
        episode.
        """

    @property
    def keeps_snapshots(self) -> bool:
        """True if snapshots are stored. An evaluation, for example, stores no snapshots."""

    @property
    def is_recalled(self) -> bool:
        """True if the newest turn was generated before a crash. The environment may have acted on this turn already."""

    @property
    def ports(self) -> EnvironmentPorts:
        """Tokenizer, renderer, tools and clock, which the run provides to the environment."""

    @property
    def seed(self) -> int:
        """A number with which an environment may seed its random generators.

        Every attempt at an episode has the same seed, even after a crash. The episodes of one prompt have different
        seeds.
        """

    @property
    def attempt(self) -> int:
        """The number of earlier starts of the prompt. A prompt is started again if its episodes are discarded."""

    def save_snapshot(self, data: bytes) -> None:
        """Store a snapshot of the environment after a turn, so that the episode continues from here after a crash.

        The environment chooses the format of the bytes; the run never interprets them. A snapshot that is larger than
        `rollout.max_snapshot_bytes` is not stored. Raise `SnapshotRejected` if a stored snapshot cannot be restored.
        """

    def forget_turns(self, reason: str) -> None:
        """Let the policy generate all further turns, even those that it already generated before a crash.

        An environment that cannot repeat its actions calls this method if there is no snapshot. The reason is recorded
        if turns were generated before the crash.
        """

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        """Let the policy continue the response. Return None if the episode is over or has reached a limit, or if the
        response has no room left.

        Args:
            stop: each of these strings ends the generation and stays in the response.
            max_tokens: the policy generates at most this number of tokens; the default is `room`.

        Raises:
            EngineFailed: generation failed `rollout.attempts` times, because no inference engine was alive.
        """

    def add(self, tokens: Sequence[int]) -> None:
        """Append at most `room` tokens to the response.

        The policy did not generate the added tokens and is not trained on them.
        """

    def start_branch(self, tokens: Sequence[int]) -> None:
        """Continue with a rewritten context: the prompt, followed by `tokens` instead of the response so far.

        Call `start_branch` to remove or change tokens that the policy has read, for example to remove earlier thoughts
        or to summarize a long history. The policy is trained once on each token that it generated, with the context in
        which it generated the token. The policy is not trained on `tokens`. Each branch gets the reward of the episode,
        and the branches together count as one episode.

        Raises:
            ValueError: there are more tokens than a response may have.
        """

    def take_role(self, name: str) -> None:
        """Let the policy act in this role until `take_role` is called again. One policy plays all roles of an episode.

        Each role has a context of its own: its prompt (`replace_prompt`), its response, its room and its branches. A
        role that has acted before continues its own context; a new role begins with the prompt of the episode. An
        episode begins in a role without a name. Each role gets the reward that `Score.roles` names. A role is compared
        only with the same role in the other episodes of the prompt.

        Raises:
            ValueError: the name is empty or too long.
        """

    def extend(self, messages: Sequence[Message]) -> bool:
        """Append chat messages after the newest answer, so that the policy can answer again. If no room for an answer
        would be left, change nothing and return False.

        The tokens that the policy sampled stay in the context. If the chat template changes earlier answers (some
        templates remove thoughts), the whole conversation is rendered again and a branch begins (`start_branch`).

        Raises:
            ValueError: the policy has not answered since the last call.
        """

    async def extend_apart(self, messages: Sequence[Message]) -> bool:
        """Do the same as `extend`, in a thread if the messages are long, so that other episodes are not delayed."""

    def read_action(self, tokens: Sequence[int]) -> Action:
        """Read the tool calls in tokens of the response. If a call is malformed, the returned action has a `fault`, and
        the newest turn gets the penalty `environment.unparsable_penalty`.
        """

    def reward(self, value: float) -> None:
        """Give the newest turn a reward, in addition to the episode's score. Rewards of the same turn are added.

        The reward belongs to the last token that the policy generated in the turn.

        Raises:
            ValueError: there is no turn yet, or the value is not a finite number.
        """

    def enter_state(self, key: str) -> None:
        """Name the environment state in which the next turn acts.

        An objective can compare turns that acted in equal states. A hash of `key` is stored. The name applies to one
        turn only. A turn whose state has no name is compared with no other turn.
        """

    def replace_prompt(self, tokens: Sequence[int]) -> None:
        """Replace the tokens of the prompt by these tokens, for example to add tools or an observation.

        `room` shrinks by the number of tokens by which the prompt grows. In an episode with several roles, only the
        prompt of the acting role is replaced.

        Raises:
            ValueError: the response has begun, or has no room left.
        """

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """End the episode's generation and score these tokens with the prompt's scorer.

        Return None if the episode is no longer wanted.

        After a call of `judge`, the policy generates no more tokens for the episode.
        """

    async def score(self, tokens: Sequence[int], reference: Mapping[str, Any] | None = None) -> Score:
        """Score these tokens with the prompt's scorer. The episode continues.

        If `reference` is given, the scorer uses `reference` instead of the prompt's own reference answer.
        """


class Environment(Protocol):
    """Runs episodes. A single environment object runs all episodes of a run. See the module's docstring.

    The start of each turn is recorded if `has_turns` is true, which means that an episode may have several turns. If
    `keeps_deadlines` is true, the environment itself enforces the limits of `[environment]` on its computing time.
    """

    has_turns: bool = True
    keeps_deadlines: bool = False

    async def play(self, episode: Episode) -> Score | float | None:
        """Run an episode and return its score as a `Score` or a number. Return None if the episode gets no reward.

        If `play` returns None although the run still needs the episode, the reward is 0.
        """

    async def measure(self, logprobs: LogProbs, ports: EnvironmentPorts) -> Mapping[str, float]:
        """Return additional measures of a policy by name, which each evaluation of the run reports.

        An environment overrides this method if it can compute a measure from the policy's probabilities, without
        playing episodes. Without a model, as in a simulation, `logprobs` returns None.
        """
        return {}


def charge_unparsable(episode: Episode) -> None:
    """Subtract the penalty for an unreadable action from the reward of the newest turn."""
    if penalty := episode.ports.limits.unparsable_penalty:
        episode.reward(-penalty)
