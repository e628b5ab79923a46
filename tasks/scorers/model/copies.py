"""The interface between the scorer of a reward model and the copies of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rollflow.storage.errors import RollflowError
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.scorers.model.inputs import Conversation


class Grade(NamedTuple):
    """A reward model's logit or probability for a response, the number of cut input tokens, and why grading failed (""
    if it did not).
    """

    raw: float
    cut: int = 0
    fault: str = ""


class Grader(Protocol):
    """A loaded reward model, which only one thread may use at a time."""

    def grade(self, conversations: Sequence[Conversation]) -> list[Grade]:
        """Return the grades of responses, in the order of the responses."""


class ModelAway(RollflowError):
    """Raised if a copy of the model cannot grade responses now, for example because its process has died."""


class ModelCopies(Protocol):
    """The copies of a reward model, numbered from 0."""

    async def start(self) -> None:
        """Start the copies of the reward model, unless another process starts them."""

    async def wait_ready(self, number: int) -> None:
        """Wait until copy `number` has loaded the model; raise `ModelAway` if the copy is not available."""

    async def grade(self, number: int, conversations: Sequence[Conversation]) -> list[Grade]:
        """Grade responses with copy `number` of the model; raise `ModelAway` if the copy is not available."""


class LocalCopy(ModelCopies):
    """A single copy of the reward model in this process, which serves all copy numbers."""

    def __init__(self, load: Callable[[], Grader]) -> None:
        """Store the function `load`, which loads the model and runs in a thread."""
        self._classifier = AsyncOnce(lambda: asyncio.to_thread(load))
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Load the model."""
        await self._classifier.get()

    async def wait_ready(self, number: int) -> None:
        """Return at once, because `start` has loaded the model."""

    async def grade(self, number: int, conversations: Sequence[Conversation]) -> list[Grade]:
        """Grade responses in a thread."""
        classifier = await self._classifier.get()
        async with self._turn:
            return await asyncio.to_thread(classifier.grade, conversations)
