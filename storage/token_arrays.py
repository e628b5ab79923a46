"""Defines immutable arrays of numbers, which are stored as raw bytes in Arrow's layout. An array takes four bytes per
token, while a tuple of Python numbers takes 30 to 60 bytes and is pickled number by number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import index
from typing import Any, ClassVar, Self, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", int, float, bool)
ANY_TOKEN = 1 << 31  # greater than every token id, because token ids are signed 32-bit integers
LENGTHS = 4096  # largest number of cached `struct.Struct` objects, one for each length of a row


class TokenArray(Sequence[Number]):
    """An immutable array of numbers of one type. A token array equals a sequence whose numbers, rounded to the array's
    type, are the same.
    """

    __slots__ = ("data",)
    code: ClassVar[str]  # the format character of Python's module `struct` for one number of the array
    size: ClassVar[int]  # bytes per number

    def __init__(self, data: bytes = b"") -> None:
        """Create a token array from `data`, the bytes of the numbers in the machine's byte order."""
        self.data = data

    @classmethod
    def of(cls, numbers: Iterable[Number]) -> Self:
        """Convert numbers to a token array; a token array of the same type is returned without a copy.

        Raises:
            TypeError: an item is not a number, or not of the array's type.
        """
        if type(numbers) is cls:
            return numbers
        numbers = numbers if isinstance(numbers, list | tuple) else tuple(numbers)
        try:
            return cls(_packer(len(numbers), cls.code)(*numbers))
        except struct.error as error:
            raise TypeError(f"{cls.__name__}: {error}") from None

    @classmethod
    def same(cls, number: Number, count: int) -> Self:
        """Return a token array that repeats `number` as often as `count` says."""
        return cls(_packer(1, cls.code)(number) * count)

    @classmethod
    def concatenate(cls, parts: Iterable[TokenArray[Number]]) -> Self:
        """Concatenate token arrays of this type."""
        return cls(b"".join([part.data for part in parts]))

    def __len__(self) -> int:
        return len(self.data) // self.size

    def __bool__(self) -> bool:
        return bool(self.data)

    @overload
    def __getitem__(self, place: SupportsIndex) -> Number: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: SupportsIndex | slice) -> Number | Self:
        if not isinstance(place, slice):
            number: Number = self._view[index(place)]
            return number
        start, stop, step = place.indices(len(self))
        if step == 1:
            return type(self)(self.data[start * self.size : stop * self.size])
        return type(self)(self._view[place].tobytes())

    def __iter__(self) -> Iterator[Number]:
        numbers: list[Number] = self._view.tolist()
        return iter(numbers)

    def __add__(self, other: Sequence[Number]) -> Self:
        return type(self)(self.data + type(self).of(other).data)

    def __radd__(self, other: Sequence[Number]) -> Self:
        return type(self).of(other) + self

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self.data == other.data
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        try:
            return len(other) == len(self) and type(self).of(other).data == self.data
        except TypeError:  # the compared sequence has items that are not numbers
            return False

    def __hash__(self) -> int:
        return hash(tuple(self))  # a token array and an equal tuple must have the same hash

    def __reduce__(self) -> tuple[Callable[[bytes], Self], tuple[bytes]]:
        return type(self), (self.data,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}.of({list(self)})"

    @property
    def array(self) -> NDArray[Any]:
        """A read-only NumPy view of the token array."""
        return np.frombuffer(self.data, self.code)

    @property
    def _view(self) -> Any:
        return memoryview(self.data).cast(self.code)  # type: ignore[call-overload]


class Int32s(TokenArray[int]):
    """Token ids, or policy versions."""

    __slots__ = ()
    code, size = "i", 4


class Int16s(TokenArray[int]):
    """Ids of experts, to which a mixture-of-experts model routed tokens."""

    __slots__ = ()
    code, size = "h", 2


class Int64s(TokenArray[int]):
    """Indices of prompts, or hashes of environment states."""

    __slots__ = ()
    code, size = "q", 8


class Float32s(TokenArray[float]):
    """Log-probs (nats), or rewards of tokens."""

    __slots__ = ()
    code, size = "f", 4


class Bools(TokenArray[bool]):
    """A mask, one byte per token."""

    __slots__ = ()
    code, size = "?", 1


@dataclass(frozen=True, slots=True)
class TokenSets:
    """A sequence of token sets. The set at index n contains `counts[n]` tokens, and `tokens` lists the tokens of all
    sets in order.
    """

    counts: Int32s
    tokens: Int32s

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]]) -> TokenSets:
        """Convert a list of sequences of token ids to `TokenSets`."""
        arrays = [Int32s.of(tokens) for tokens in sets]
        return cls(Int32s.of([len(tokens) for tokens in arrays]), Int32s.concatenate(arrays))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Int32s]:
        ends = list(accumulate(self.counts, initial=0))
        return (self.tokens[start:end] for start, end in pairwise(ends))


def sum_values(values: Float32s) -> float:
    """Return the sum of the numbers that are not NaN, in float64."""
    return float(np.nansum(values.array, dtype=np.float64))


@lru_cache(LENGTHS)  # the cache is bounded, because rows of a run have many different lengths
def _packer(count: int, code: str) -> Callable[..., bytes]:
    return struct.Struct(f"{count}{code}").pack
