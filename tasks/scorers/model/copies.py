"""The interface between a reward model's scorer and the copies of the model, and a copy in the scorer's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rollflow.storage.errors import RollflowError
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.scorers.model.inputs import Conversation


class Grade(NamedTuple):
    """A model's logit or probability of a response, the number of tokens that were cut off, and why there is no number,
    or "".
    """

    raw: float
    cut: int = 0
    fault: str = ""


class Grader(Protocol):
    """A loaded model, which one thread uses at a time."""

    def grade(self, conversations: Sequence[Conversation]) -> list[Grade]:
        """Grade responses, in their order."""


class ModelAway(RollflowError):
    """Raised if a copy of the model cannot grade responses now, for example because its process has died."""


class ModelCopies(Protocol):
    """The copies of a reward model, numbered from 0."""

    async def start(self) -> None:
        """Start the copies, unless somebody else starts them."""

    async def wait_ready(self, number: int) -> None:
        """Wait until the copy `number` has loaded the model; raise `ModelAway` if the copy is not there."""

    async def grade(self, number: int, conversations: Sequence[Conversation]) -> list[Grade]:
        """Grade responses with the copy `number`; raise `ModelAway` if the copy is lost."""


class LocalCopy(ModelCopies):
    """One copy of the model in this process, which all numbers share."""

    def __init__(self, load: Callable[[], Grader]) -> None:
        """Store the function that loads the model, which runs in a thread."""
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
