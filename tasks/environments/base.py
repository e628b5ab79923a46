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

# computes the log-probs in nats of tokens[1:] under a policy, each given the tokens before it; None without a model
LogProbs = Callable[[Sequence[int]], Awaitable[Sequence[float] | None]]


class SnapshotRejected(RollflowError):
    """Raised by an environment that cannot be restored from a snapshot. The environment then repeats its actions."""


class Episode(Protocol):
    """One response in progress. Through an `Episode`, an environment generates tokens and has the tokens scored."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode."""

    @property
    def response(self) -> Sequence[int]:
        """All tokens of the response in the current branch, both from the policy and from the environment."""

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the response."""

    @property
    def limit(self) -> str:
        """A sentence that names the limit at which the episode gets no further turn; "" if another turn may follow.

        At a limit, `generate` returns None. The environment may still score the state reached.
        """

    @property
    def id(self) -> str:
        """A text that identifies the episode in its run; "" in an evaluation. After a crash, the id is the same again.

        An environment whose actions change something outside of the environment can give the id and the number of the
        turn with each action, so that an action is not done twice.
        """

    @property
    def turn_id(self) -> str:
        """A text that identifies the newest turn in its run; "" in an evaluation, and before the first turn. After a
        crash, the text is the same again, so an environment can look up whether it has acted on this turn."""

    @property
    def snapshot(self) -> bytes | None:
        """The newest snapshot that the environment stored before a crash, until the first generation; else None.

        If there is a snapshot, the episode already has all turns, tokens, rewards and branches that it had when the
        snapshot was stored. The environment must restore itself from the snapshot, and not begin the episode.
        """

    @property
    def keeps_snapshots(self) -> bool:
        """True if snapshots are stored. An evaluation, for example, stores none."""

    @property
    def is_recalled(self) -> bool:
        """True if the newest turn was generated before a crash. The environment may have acted on this turn already."""

    @property
    def ports(self) -> EnvironmentPorts:
        """Tokenizer, renderer, tools and clock, which the run gives to the environment."""

    @property
    def seed(self) -> int:
        """A number from which an environment may draw its random numbers.

        Every attempt at an episode has the same number, even after a crash. The episodes of one prompt have different
        numbers.
        """

    @property
    def attempt(self) -> int:
        """The number of earlier starts of the prompt. A prompt is started again if its episodes are discarded."""

    def save_snapshot(self, data: bytes) -> None:
        """Store a snapshot of the environment after a turn, so that the episode continues from here after a crash.

        The bytes are the environment's own; the run never interprets them. A snapshot that is larger than
        `rollout.max_snapshot_bytes` is not stored. Raise `SnapshotRejected` if a stored snapshot cannot be restored.
        """

    def forget_turns(self, reason: str) -> None:
        """Let the policy generate all further turns, even those that it already generated before a crash.

        An environment that cannot repeat its actions calls this method if there is no snapshot. The reason is recorded
        if turns were generated before the crash.
        """

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        """Let the policy continue the response. Return None if the episode is over or at a `limit`, or if the response
        has no room left.

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
        """Continue with a rewritten context: `tokens` replace the response so far, and follow the prompt.

        Call `start_branch` if tokens that the policy has read are left out or changed, for example because earlier
        thoughts are removed or a long history is summarized. The policy is trained once on each token that it
        generated, with the context in which it generated the token. The policy is not trained on `tokens`. Each branch
        has the reward of the episode, and the episode counts once.

        Raises:
            ValueError: there are more tokens than a response may have.
        """

    def take_role(self, name: str) -> None:
        """Let the policy act in this role until the next call. Several roles of an episode are played by one policy.

        Each role has a context of its own: its prompt (`replace_prompt`), its response, its room and its branches. A
        role that was taken before continues its context; a new role begins with the prompt of the episode. An episode
        begins in a role without a name. Each role gets the reward that `Score.roles` names, and is compared with the
        same role of the other episodes of the prompt only.

        Raises:
            ValueError: the name is empty or too long.
        """

    def extend(self, messages: Sequence[Message]) -> bool:
        """Let chat messages follow the newest answer, so that the policy can answer again. Return False, and change
        nothing, if no room for an answer would be left.

        The tokens that the policy sampled stay in the context. If the chat template changes earlier answers, as some
        do that remove thoughts, the whole conversation is rendered again and a branch begins (`start_branch`).

        Raises:
            ValueError: the policy has not answered since the last call.
        """

    async def extend_apart(self, messages: Sequence[Message]) -> bool:
        """Do the same as `extend`, in a thread if the messages are long, so that other episodes are not delayed."""

    def read_action(self, tokens: Sequence[int]) -> Action:
        """Read the tool calls in tokens of the response. If a call is malformed, the action has a `fault`, and the
        newest turn gets the penalty `environment.unparsable_penalty`.
        """

    def reward(self, value: float) -> None:
        """Give the newest turn a reward, in addition to the episode's score. Rewards of the same turn are added.

        The reward belongs to the last token that the policy generated in the turn.

        Raises:
            ValueError: there is no turn yet, or the value is not a finite number.
        """

    def enter_state(self, key: str) -> None:
        """Name the environment state in which the next turn acts.

        An objective can compare turns that acted in equal states. A hash of `key` is stored. The name is used for one
        turn; a turn without a name is compared with no other turn.
        """

    def replace_prompt(self, tokens: Sequence[int]) -> None:
        """Let the episode begin with these tokens instead of the prompt's, for example with tools or an observation.

        `room` shrinks by the number of tokens by which the prompt grows. In an episode with several roles, only the
        acting role begins with these tokens.

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

        If an episode that is still wanted gets no reward, its reward is 0.
        """

    async def measure(self, logprobs: LogProbs, ports: EnvironmentPorts) -> Mapping[str, float]:
        """Return further measures of a policy by name, which each evaluation of the run reports.

        An environment that can compute a measure from probabilities of the policy, without playing, overrides this
        method. Without a model, as in a simulation, `logprobs` returns None.
        """
        return {}


def charge_unparsable(episode: Episode) -> None:
    """Give the newest turn the penalty for an action that cannot be read."""
    if penalty := episode.ports.limits.unparsable_penalty:
        episode.reward(-penalty)
