"""Defines the players of `rollflow play`. A player writes one answer for each turn of an episode.

    PersonPlayer    a person at the terminal types the answers
    RandomPlayer    each token is drawn at random
    EnginePlayer    a policy generates the answers on an engine in this process
    EndpointPlayer  a model behind an OpenAI-compatible endpoint answers (module `endpoint`)

An answer keeps the limits of its turn: it ends at the first stop string, or at the largest number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollflow.flows.commands.play.transcript import Transcript
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.episode import Turn
from rollflow.tasks.rollout.proxy import InferenceProxy, VersionedGeneration

END_SHARE = 1 / 8  # probability that a random answer ends after a token


class Player(Protocol):
    """Answers the turns of episodes. `name` says who speaks."""

    name: str
    is_person: bool = False

    async def answer(self, episode: int, turn: Turn, conversation: Transcript) -> VersionedGeneration:
        """Answer a turn of episode number `episode`. The conversation ends with what the environment said last.

        Raises:
            EOFError: the player has left.
        """


def generate_text(text: str, turn: Turn, tokenizer: PolicyTokenizer) -> VersionedGeneration:
    """Convert a text into the answer to a turn. The text is cut at the first stop string and at the largest number of
    tokens; an uncut text gets an end token if there is room.
    """
    cut, stopped = cut_at_stop(text, turn.stop)
    tokens = list(tokenizer.encode_response(cut))
    if len(tokens) > turn.max_new_tokens:
        return _generate(tokens[: turn.max_new_tokens], StopReason.LENGTH)
    room = len(tokens) < turn.max_new_tokens
    return _generate([*tokens, *(tokenizer.stop_tokens[:1] if room and not stopped else ())], StopReason.STOP)


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to the end of its first stop string, and whether there is one."""
    ends = [text.index(one) + len(one) for one in stop if one in text]
    return (text[: min(ends)], True) if ends else (text, False)


def _generate(tokens: Sequence[int], ending: StopReason) -> VersionedGeneration:
    nothing = [0.0] * len(tokens)  # Nobody trains on played episodes, so their log-probs are not computed.
    return VersionedGeneration(Generation("", TokenSpan.of(tokens, nothing, [0] * len(tokens)), ending), 0)


@dataclass
class PersonPlayer:
    """A person who plays. `read(marks)` shows the text `marks` and asks the person for a line."""

    tokenizer: PolicyTokenizer
    read: Callable[[str], Awaitable[str]]
    warn: Callable[[str], None]
    name: str = "you"
    is_person: bool = True

    async def answer(self, episode: int, turn: Turn, conversation: Transcript) -> VersionedGeneration:
        """Ask the person for an answer. A line that ends with a backslash is continued on the next line."""
        lines = [await self.read("  > ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(await self.read("  . "))
        text = "\n".join(lines)
        if "\n" in turn.stop:
            text += "\n"  # The person has pressed Enter, which is what the environment waits for.
        found = generate_text(text, turn, self.tokenizer)
        if found.generation.ending is StopReason.LENGTH:
            self.warn(f"the answer was cut after {turn.max_new_tokens} tokens")
        elif (read := self.tokenizer.decode_response(found.generation.tokens)) != cut_at_stop(text, turn.stop)[0]:
            self.warn(f"the policy's tokenizer cannot write this answer; the environment reads {read!r}")
        return found


@dataclass
class RandomPlayer:
    """A policy that draws each token at random. Two episodes with the same seed get the same answers."""

    tokenizer: PolicyTokenizer
    seed: int
    name: str = "random policy"
    is_person: bool = False
    _tokens: list[int] = field(default_factory=list)

    async def answer(self, episode: int, turn: Turn, conversation: Transcript) -> VersionedGeneration:
        """Draw tokens until the end token, a stop string, or the largest number of tokens."""
        draw = random.Random(f"{self.seed}:{episode}:{turn.number}")
        if not self._tokens:
            special = {*self.tokenizer.special.values(), *self.tokenizer.stop_tokens}
            self._tokens = sorted({*self.tokenizer.vocabulary.values()} - special)
        found = list[int]()
        while len(found) < turn.max_new_tokens:
            if draw.random() < END_SHARE:
                return _generate([*found, *self.tokenizer.stop_tokens[:1]], StopReason.STOP)
            found.append(draw.choice(self._tokens))
            if cut_at_stop(self.tokenizer.decode_response(found), turn.stop)[1]:
                return _generate(found, StopReason.STOP)
        return _generate(found, StopReason.LENGTH)


@dataclass
class EnginePlayer:
    """A policy on an engine in this process."""

    name: str
    proxy: InferenceProxy
    temperature: float
    seed: int
    is_person: bool = False

    async def answer(self, episode: int, turn: Turn, conversation: Transcript) -> VersionedGeneration:
        """Let the policy generate an answer."""
        request = GenerationRequest(
            id=f"play.{episode}.{turn.number}",
            prompt=turn.prompt,
            max_new_tokens=turn.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed + episode + (turn.number << 40),  # with equal seeds, the turns would repeat the same draws
            stop=turn.stop,
        )
        return await self.proxy.generate(request)
