"""Numbers in a row as the bytes that Arrow keeps: what an engine has written once travels without being looked at.

A tuple of Python's numbers takes 30 to 60 bytes a number, and everybody who hands it on pays for each of them. These
take four, and are cut, joined and pickled as bytes. Who wants the numbers gets them: they read like any sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import index
from typing import Any, ClassVar, Self, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", int, float, bool)
ANY_TOKEN = 1 << 31  # every one that four bytes hold is below
LENGTHS = 4096  # of rows, for which there is a packer ready


class Flat(Sequence[Number]):
    """N numbers of one type; immutable. Equal to any sequence of the same numbers, which are rounded to the type."""

    __slots__ = ("data",)
    code: ClassVar[str]  # of `struct`
    size: ClassVar[int]  # bytes of a number

    def __init__(self, data: bytes = b"") -> None:
        """`data`: the numbers' bytes, in the machine's order."""
        self.data = data

    @classmethod
    def of(cls, numbers: Iterable[Number]) -> Self:
        """These numbers; what is flat already is not copied.

        Raises:
            TypeError: one of them is no number of this type.
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
        """A number, `count` times."""
        return cls(_packer(1, cls.code)(number) * count)

    @classmethod
    def joined(cls, parts: Iterable[Flat[Number]]) -> Self:
        """One after another."""
        return cls(b"".join([part.data for part in parts]))

    def __len__(self) -> int:
        return len(self.data) // self.size

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
        except TypeError:  # not numbers
            return False

    def __hash__(self) -> int:
        return hash(tuple(self))  # as the tuple that it equals

    def __reduce__(self) -> tuple[Callable[[bytes], Self], tuple[bytes]]:
        return type(self), (self.data,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}.of({list(self)})"

    @property
    def array(self) -> NDArray[Any]:
        """The numbers where they are; not to be written to."""
        return np.frombuffer(self.data, self.code)

    @property
    def _view(self) -> Any:
        return memoryview(self.data).cast(self.code)  # type: ignore[call-overload]


class Int32s(Flat[int]):
    """Token ids, or versions."""

    __slots__ = ()
    code, size = "i", 4


class Int64s(Flat[int]):
    """Places in a run's order."""

    __slots__ = ()
    code, size = "q", 8


class Float32s(Flat[float]):
    """Log-probs (nats)."""

    __slots__ = ()
    code, size = "f", 4


class Bools(Flat[bool]):
    """A mask, a byte each."""

    __slots__ = ()
    code, size = "?", 1


@lru_cache(LENGTHS)  # a run may have rows of as many lengths as its longest has tokens
def _packer(count: int, code: str) -> Callable[..., bytes]:
    return struct.Struct(f"{count}{code}").pack
