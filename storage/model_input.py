"""What a policy reads: an ordered list of parts.

A part is an array of tokens, or a *foreign part*: something else, such as an image, named by the hash of its content. A
foreign part takes a number of positions in the policy's context. The engines and learners of this release
read tokens alone, and refuse an input with a foreign part.

An input is stored and sent in its flat form: one number for each of T positions, with `NO_TOKEN` at the positions of
foreign parts, and the foreign parts with their places. The flat form of tokens is the token array itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """An immutable list of parts, in order. Create it by `of`, `from_parts` or `from_flat`.

    Token parts are not empty, and two of them never follow each other. So equal inputs have equal parts.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, tokens: Iterable[int]) -> ModelInput:
        """Create an input of tokens alone.

        Raises:
            TypeError: an item is no token id.
        """
        array = Int32s.of(tokens)
        return cls((array,)) if array.data else cls(())

    @classmethod
    def from_parts(cls, parts: Iterable[Part]) -> ModelInput:
        """Create an input from any parts: join token parts that follow each other, and leave out empty ones."""
        found = list[Part]()
        for part in parts:
            if isinstance(part, ForeignPart):
                found.append(part)
            elif found and isinstance(found[-1], Int32s):
                found[-1] += part
            elif part:
                found.append(part)
        return cls(tuple(found))

    @classmethod
    def from_flat(cls, flat: Int32s, placed: Sequence[PlacedPart] = ()) -> ModelInput:
        """Create an input from its flat form.

        Raises:
            ValueError: a foreign part overlaps the one before it, or reaches beyond the end.
        """
        if not placed:
            return cls.of(flat)
        parts, end = list[Part](), 0
        for position, part in placed:
            if not end <= position <= len(flat) - part.length:
                raise ValueError(f"a part of {part.length} positions does not fit at {position} of {len(flat)}")
            parts += [flat[end:position], part]
            end = position + part.length
        return cls.from_parts([*parts, flat[end:]])

    @property
    def length(self) -> int:
        """T, the number of positions in the policy's context."""
        return sum(part.length if isinstance(part, ForeignPart) else len(part) for part in self.parts)

    @property
    def tokens(self) -> Int32s:
        """The tokens of an input that is tokens alone. Raises `ConfigError` for another input."""
        return self.read_tokens("this part of rollflow")

    def read_tokens(self, reader: str) -> Int32s:
        """Return the tokens for a reader that can read tokens alone.

        Raises:
            ConfigError: the input has a foreign part; the message names the reader and the part.
        """
        if not self.parts:
            return Int32s()
        first = self.parts[0]
        if len(self.parts) == 1 and isinstance(first, Int32s):
            return first
        raise refuse(reader, self.placed[0])

    @property
    def flat(self) -> Int32s:
        """(T,) The tokens, with `NO_TOKEN` at each position of a foreign part."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Int32s):
            return self.parts[0]
        parts = (p if isinstance(p, Int32s) else Int32s.same(NO_TOKEN, p.length) for p in self.parts)
        return Int32s.concatenate(parts)

    @property
    def placed(self) -> tuple[PlacedPart, ...]:
        """The foreign parts with their places, in order."""
        found, position = list[PlacedPart](), 0
        for part in self.parts:
            if isinstance(part, ForeignPart):
                found.append(PlacedPart(position, part))
                position += part.length
            else:
                position += len(part)
        return tuple(found)

    def followed_by(self, tokens: Int32s) -> ModelInput:
        """Return this input with more tokens at its end."""
        return ModelInput.from_parts([*self.parts, tokens]) if tokens else self


def refuse(reader: str, placed: PlacedPart) -> ConfigError:
    """Create the error of a reader that cannot read a foreign part."""
    position, part = placed
    return ConfigError(
        f"{reader} reads tokens alone, but the input has a part of the kind {part.kind!r} at position {position} "
        f"(sha256 {part.sha256[:12]}, {part.length} positions); use prompts of text"
    )
