"""Defines the input of a policy: an ordered list of token arrays and *foreign parts*, such as images.

A foreign part is named by the hash of its content, and occupies one or more positions in the policy's context. An input
is stored in a flat form: one number for each position (`NO_TOKEN` for a foreign part), and the foreign parts with their
positions. The engines and learners of this release of rollflow read only tokens, and raise an error for a foreign part.
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
    """A part of the policy's input that is not an array of tokens, such as an image. The field `kind` is the type of
    the part, such as "image", and `sha256` is the hash of the part's content.
    """

    kind: str
    sha256: str
    length: int  # number of positions that this part occupies in the policy's context


class PlacedPart(NamedTuple):
    """A part of the policy's input that is not tokens, such as an image, and the position at which the part begins."""

    position: int
    part: ForeignPart


Part: TypeAlias = Int32s | ForeignPart


@dataclass(frozen=True, slots=True)
class ModelInput:
    """An immutable input of the policy: an ordered list of parts, stored in its flat form."""

    flat: Int32s  # tokens by position, with `NO_TOKEN` at each position of a part that is not tokens, such as an image
    placed: tuple[PlacedPart, ...] = ()  # parts that are not tokens, such as images, with their positions, in order

    @classmethod
    def of(cls, tokens: Iterable[int]) -> ModelInput:
        """Create an input that consists of tokens alone.

        Raises:
            TypeError: an item is not a token id.
        """
        return cls(Int32s.of(tokens))

    @classmethod
    def from_parts(cls, parts: Iterable[Part]) -> ModelInput:
        """Create an input from a list of its parts. Adjacent token arrays in the list are merged into one part."""
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
        """Create an input from its flat form, which another process wrote.

        Raises: ValueError: a part that is not tokens overlaps the previous such part, or reaches beyond the end of the
            input.
        """
        placed, end = tuple(placed), 0
        for position, part in placed:
            if not end <= position <= len(flat) - part.length:
                raise ValueError(
                    f"a part of {part.length} positions does not fit at position {position} of an input of "
                    f"{len(flat)} positions"
                )
            end = position + part.length
        return cls(flat, placed)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the input, in order."""
        found, end = list[Part](), 0
        for position, part in self.placed:
            found += [self.flat[end:position], part]
            end = position + part.length
        return tuple(part for part in (*found, self.flat[end:]) if isinstance(part, ForeignPart) or part)

    @property
    def length(self) -> int:
        """The number of positions that the input occupies in the policy's context."""
        return len(self.flat)

    @property
    def tokens(self) -> Int32s:
        """The input's tokens. Raises `ConfigError` if the input has an image or another part that is not tokens."""
        return self.read_tokens("this part of rollflow")

    def read_tokens(self, reader: str) -> Int32s:
        """Return the tokens of the input, for a component that cannot read images or other parts that are not tokens.

        Raises: ConfigError: the input has a part that is not tokens; the message names the component and the part.
        """
        if self.placed:
            raise refuse(reader, self.placed[0])
        return self.flat

    def followed_by(self, tokens: Int32s) -> ModelInput:
        """Return a new input that consists of this input and the given tokens."""
        return ModelInput(self.flat + tokens, self.placed) if tokens else self


def refuse(reader: str, placed: PlacedPart) -> ConfigError:
    """Create the error that a component raises if it cannot read an image or another part that is not tokens."""
    position, part = placed
    return ConfigError(
        f"{reader} reads tokens alone, but the input has a part of the kind {part.kind!r} at position {position} "
        f"(sha256 {part.sha256[:12]}, {part.length} positions); use prompts of text"
    )
