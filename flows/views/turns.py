"""Splits a trajectory into parts: the prompt, the turns of the policy, and what the environment wrote between them. A
part ends where the value of the loss mask changes, and where a turn starts. In runs that did not record where turns
start, two adjacent turns form one part.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from rollflow.storage.model_input import NO_TOKEN
from rollflow.storage.records import GroupKey, Trajectory, TrajectoryGroup

MOST_PARTS = 60  # Largest number of parts of an episode on the page of a run.
LONGEST_PART = 2000  # Largest number of characters of a part on the page of a run.
Author = Literal["prompt", "context", "policy", "environment"]

CONTROLS = re.compile(r"[\x00-\x06\x0e-\x1f\x7f-\x9f]")  # rich itself removes \x07 to \x0d, or breaks the line at them
COLOURS = {"prompt": "cyan", "context": "cyan", "system": "cyan", "environment": "yellow", "tool": "yellow"}


@dataclass(frozen=True, slots=True)
class TurnPart:
    """Consecutive tokens of a trajectory that have the same author, from token number `start` on. The fields after
    `tokens` are set only if the policy generated the tokens.

    The author "context" stands for the beginning of a branch: the prompt, and the context that the environment rewrote.
    """

    author: Author
    start: int
    tokens: Sequence[int]
    logprobs: Sequence[float] = ()  # Log-probability in nats of each token.
    versions: Sequence[int] = ()
    turn: int = 0  # number of the turn, from 1
    reward: float | None = None  # sum of the rewards of the part's tokens; None if no token has a reward
    state: int | None = None  # hash of the environment state in which the turn acted; None if the state has no name

    @property
    def readable(self) -> list[int]:
        """The tokens of this part that have text. Positions of images and of other input are left out."""
        return [token for token in self.tokens if token != NO_TOKEN]

    @property
    def notes(self) -> list[str]:
        """Notes about this part for people: its turn, tokens, versions, log-probs and reward."""
        count, last = len(self.tokens), self.start + len(self.tokens) - 1
        found = [f"turn {self.turn}"] if self.turn else []
        found.append(f"{count} token{'s' * (count != 1)} ({self.start}-{last})")
        if self.author == "policy":
            found += [_describe_versions(self.versions), f"log-prob {describe_logprobs(self.logprobs)}"]
        found += [f"reward {self.reward:g}"] if self.reward is not None else []
        found += [f"state {name_state(self.state)}"] if self.state is not None else []
        return found

    def value(self, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return this part of the trajectory as JSON values, with its text."""
        value: dict[str, Any] = {"by": self.author, "start": self.start, "tokens": len(self.tokens)}
        value |= {"loss_mask": self.author == "policy", "text": decode(self.readable)}
        if self.logprobs:
            mean, least = sum(self.logprobs) / len(self.logprobs), min(self.logprobs)
            value |= {"versions": dict(Counter(self.versions)), "logprob_mean": mean, "logprob_min": least}
        given = {"turn": self.turn or None, "reward": self.reward, "state": self.state}
        return value | {name: found for name, found in given.items() if found is not None}


def split_turns(trajectory: Trajectory) -> list[TurnPart]:
    """Split a trajectory into the prompt, the policy's turns and the environment's answers, in order of their
    tokens.
    """
    parts, turns = list[TurnPart](), 0
    states = _find_states(trajectory)
    for start, end in _cut(trajectory):
        tokens = list(trajectory.tokens[start:end])
        if trajectory.loss_mask[start]:
            turns += 1
            own = list(trajectory.logprobs[start:end]), list(trajectory.versions[start:end])
            reward, state = _sum_rewards(trajectory, start, end), states.get(start)
            parts.append(TurnPart("policy", start, tokens, *own, turns, reward, state))
        else:
            first: Author = "prompt" if trajectory.branch is None else "context"
            parts.append(TurnPart("environment" if parts else first, start, tokens))
    return parts


def _cut(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Return start and end of each part as positions of tokens. The end is the first position after the part."""
    mask, starts = trajectory.loss_mask, {*(trajectory.turn_starts or ())}
    cuts = [at for at in range(1, len(mask)) if mask[at] != mask[at - 1] or at in starts]
    edges = [0, *cuts, len(mask)]
    return ((start, end) for start, end in pairwise(edges) if end > start)


def _sum_rewards(trajectory: Trajectory, start: int, end: int) -> float | None:
    given = [one for one in (trajectory.token_rewards or ())[start:end] if not math.isnan(one)]
    return math.fsum(given) if given else None


def _find_states(trajectory: Trajectory) -> dict[int, int]:
    """Return the state of each turn that acted in a named state, by the position of the turn's first token."""
    states = trajectory.turn_states or ()
    starts = trajectory.turn_starts or ()
    return {start: state for start, state in zip(starts, states, strict=False) if state}


def _describe_versions(versions: Sequence[int]) -> str:
    counts = sorted(Counter(versions).items())
    if len(counts) == 1:
        return f"version {counts[0][0]}"
    return f"versions {', '.join(f'{version} ({tokens})' for version, tokens in counts)}"


def name_state(state: int) -> str:
    """Return a short name for the hash of a state: its last 32 bits as hexadecimal digits."""
    return f"{state & 0xFFFFFFFF:08x}"


def describe_logprobs(values: Sequence[float]) -> str:
    """Return the mean and the smallest of some log-probabilities as text."""
    return f"mean {sum(values) / len(values):.2f}, lowest {min(values):.2f}" if values else "none"


def render_part(speaker: str, text: str, notes: Sequence[str] = ()) -> Group:
    """Return a text below a line with its speaker and notes. The text keeps its line breaks, so that a board that an
    environment writes keeps its shape.
    """
    return Group(render_head(speaker, notes), render_text(text))


def render_head(speaker: str, notes: Sequence[str] = ()) -> Text:
    """Return a line that says who speaks."""
    line = Text(speaker, style=f"bold {COLOURS.get(speaker, 'green')}")
    line.append("".join(f" · {note}" for note in notes), style="not bold dim")
    return line


def render_text(text: str) -> Padding:
    """Return a text, indented by two columns. A text without visible characters is quoted."""
    text = escape_controls(text)
    shown = Text(text.strip("\n")) if text.strip() else Text(repr(text) if text else "(nothing)", style="dim")
    return Padding(shown, (0, 0, 0, 2), expand=False)


def escape_controls(text: str) -> str:
    """Return a text in which control characters are visible. Otherwise a policy or an environment could control the
    terminal.
    """
    return CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text)


def prompt_tokens(trajectory: Trajectory) -> Sequence[int]:
    """Return the tokens of a trajectory's prompt that have text."""
    return next((part.readable for part in split_turns(trajectory) if part.author in ("prompt", "context")), ())


def choose_episodes(groups: Iterable[TrajectoryGroup]) -> list[tuple[GroupKey, list[Trajectory]]]:
    """Return the trajectories of the episode with the highest reward, and of the one with the lowest reward."""
    judged = [(one.reward, group, one) for group in groups for one in group.trajectories if one.branch is None]
    judged = [found for found in judged if not found[2].left_out]
    if not judged:
        return []
    best, worst = (choose(judged, key=lambda found: found[0]) for choose in (max, min))
    chosen = [best] if best[0] == worst[0] else [best, worst]
    return [(group.key, list_branches(group.trajectories, one)) for _, group, one in chosen]


def list_branches(trajectories: Iterable[Trajectory], first: Trajectory) -> list[Trajectory]:
    """Return the trajectories of the episode that begins with the trajectory `first`."""
    found = {first.sample: first}
    for one in trajectories:
        if one.branch is not None and one.branch.parent in found:
            found[one.sample] = one
    return list(found.values())


def write_episode(
    key: GroupKey,
    trajectories: Sequence[Trajectory],
    decode: Callable[[Sequence[int]], str],
    place: Callable[[Sequence[TurnPart]], Iterable[TurnPart | str]] = lambda parts: parts,
) -> str:
    """Return an episode as Markdown: who wrote each part, with notes and the text. The function `place` puts frames,
    written as Markdown, between the parts.
    """
    first = trajectories[0]
    outcome = first.outcome.value if first.outcome else "no outcome"
    lines = [f"### Prompt {key.prompt}.{key.attempt}.{first.sample}: reward {first.reward:g}, {outcome}"]
    lines += [quote_text(first.reason)] if first.reason else []
    parts = [part for one in trajectories for part in split_turns(one)]
    for part in place(parts[:MOST_PARTS]):
        if isinstance(part, str):
            lines.append(part)
        else:
            lines += [f"**{part.author}** · " + " · ".join(part.notes), quote_text(decode(part.readable))]
    lines += [f"{len(parts) - MOST_PARTS} further parts are not shown."] if len(parts) > MOST_PARTS else []
    return "\n\n".join(lines)


def quote_text(text: str) -> str:
    """Return a text as a Markdown block that shows it unchanged; the middle of a long text is left out."""
    if len(text) > LONGEST_PART:
        half = LONGEST_PART // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
