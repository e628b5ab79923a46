"""What a policy reads: an ordered list of parts.

A part is an array of tokens, or a *foreign part*: something else, such as an image, named by the hash of its content. A
foreign part takes a number of positions in the policy's context. The engines and learners of this release
read tokens alone, and refuse an input with a foreign part.

An input is held, stored and sent in its flat form: one number for each of T positions, with `NO_TOKEN` at the positions
of foreign parts, and the foreign parts with their places. The flat form of tokens is the token array itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rollflow.storage.errors import ConfigError
from rollflow.storage.token_arrays import Int32s

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """A part that is no tokens. `kind` says what it is ("image"), `sha256` names its content."""

    kind: str
    sha256: str
    length: int  # number of positions in the policy's context


class PlacedPart(NamedTuple):
    """A foreign part, and the position at which it begins."""

    position: int
    part: ForeignPart


Part: TypeAlias = Int32s | ForeignPart


@dataclass(frozen=True, slots=True)
class ModelInput:
    """An immutable list of parts, in order, held in its flat form. Equal inputs have equal parts."""

    flat: Int32s  # (T,) tokens, with `NO_TOKEN` at each position of a foreign part
    placed: tuple[PlacedPart, ...] = ()  # foreign parts with their places, in order

    @classmethod
    def of(cls, tokens: Iterable[int]) -> ModelInput:
        """Create an input of tokens alone.

        Raises:
            TypeError: an item is no token id.
        """
        return cls(Int32s.of(tokens))

    @classmethod
    def from_parts(cls, parts: Iterable[Part]) -> ModelInput:
        """Create an input from its parts. Token parts that follow each other become one part."""
        arrays, placed, position = list[Int32s](), list[PlacedPart](), 0
        for part in parts:
            if isinstance(part, ForeignPart):
                placed.append(PlacedPart(position, part))
                arrays.append(Int32s.same(NO_TOKEN, part.length))
            else:
                arrays.append(part)
            position += len(arrays[-1])
        return cls(Int32s.concatenate(arrays), tuple(placed))

    @classmethod
    def from_flat(cls, flat: Int32s, placed: Iterable[PlacedPart]) -> ModelInput:
        """Create an input from a flat form that another process wrote.

        Raises:
            ValueError: a foreign part overlaps the one before it, or reaches beyond the end.
        """
        placed, end = tuple(placed), 0
        for position, part in placed:
            if not end <= position <= len(flat) - part.length:
                raise ValueError(f"a part of {part.length} positions does not fit at {position} of {len(flat)}")
            end = position + part.length
        return cls(flat, placed)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts, in order. Token parts are not empty, and two of them never follow each other."""
        found, end = list[Part](), 0
        for position, part in self.placed:
            found += [self.flat[end:position], part]
            end = position + part.length
        return tuple(part for part in (*found, self.flat[end:]) if isinstance(part, ForeignPart) or part)

    @property
    def length(self) -> int:
        """T, the number of positions in the policy's context."""
        return len(self.flat)

    @property
    def tokens(self) -> Int32s:
        """The tokens of an input that is tokens alone. Raises `ConfigError` for another input."""
        return self.read_tokens("this part of rollflow")

    def read_tokens(self, reader: str) -> Int32s:
        """Return the tokens for a reader that can read tokens alone.

        Raises:
            ConfigError: the input has a foreign part; the message names the reader and the part.
        """
        if self.placed:
            raise refuse(reader, self.placed[0])
        return self.flat

    def followed_by(self, tokens: Int32s) -> ModelInput:
        """Return this input with more tokens at its end."""
        return ModelInput(self.flat + tokens, self.placed) if tokens else self


def refuse(reader: str, placed: PlacedPart) -> ConfigError:
    """Create the error of a reader that cannot read a foreign part."""
    position, part = placed
    return ConfigError(
        f"{reader} reads tokens alone, but the input has a part of the kind {part.kind!r} at position {position} "
        f"(sha256 {part.sha256[:12]}, {part.length} positions); use prompts of text"
    )
