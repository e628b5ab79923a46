"""Defines the Ray actors that run reward models, and the client with which the reward actor calls a reward model.

Each copy of a reward model has its own Ray actor, so that the copy may use a GPU or another node, and is restarted
alone. After a failure other than lack of memory, the actor ends itself, because the state of a GPU is then unknown.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray

from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options
from rollflow.tasks.actors.statuses import RewardStatus
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.reward_models import list_models, load_model
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.scorers.model.copies import Grade, ModelAway, ModelCopies
from rollflow.tasks.scorers.model.inputs import Conversation

if TYPE_CHECKING:
    from rollflow.tasks.scorers.model.classifier import Classifier

MODEL = "reward-model"


class ModelActor:
    """Ray actor that runs one copy of a reward model."""

    def __init__(self, context: RunContext, section: str, lease: Lease | None = None) -> None:
        """Create the actor of the reward model in the config section `section`, without reading storage."""
        if lease:
            lease.hold(MODEL)
        self.context, self._section = context, section
        self._classifier: AsyncOnce[Classifier] = AsyncOnce(self._load)
        self._thread = ThreadPoolExecutor(1)
        self._ended: asyncio.Future[None] | None = None
        self._calls = self._graded = 0

    async def begin(self) -> None:
        """Load the model."""
        await self._classifier.get()

    async def run(self) -> int:
        """Grade responses until `finish` is called; return the number of graded responses.

        A restarted Prefect flow may call `run` a second time.

        Raises:
            ConfigError: the reward model cannot be loaded.
            Exception: the reward model failed in `grade`. The method `run` raises the model's own error.
        """
        await self._classifier.get()
        await asyncio.shield(self._end)
        return self._graded

    async def finish(self) -> None:
        """Make `run` return, because no more responses will be graded."""
        if not self._end.done():
            self._end.set_result(None)

    async def grade(self, conversations: Sequence[Conversation]) -> list[Grade]:
        """Grade responses.

        Raises:
            ModelAway: the reward model failed. The method `run` raises the model's own error.
        """
        classifier = await self._classifier.get()
        self._calls += 1
        try:
            grades: list[Grade] = await self._in_thread(classifier.grade, conversations, self._note_batch)
        except Exception as error:  # noqa: BLE001 - an architecture's code may raise anything here
            if not self._end.done():
                self._end.set_exception(error)
            raise ModelAway(f"the reward model failed: {type(error).__name__}: {error}") from None
        finally:
            self._calls -= 1
        return grades

    async def status(self) -> RewardStatus:
        """Return the number of graded responses, and whether the actor waits."""
        waits = self.context.store.waits or ("" if self._calls else "responses")
        return RewardStatus(waits, scored=self._graded)

    @property
    def _end(self) -> asyncio.Future[None]:
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def _note_batch(self, count: int) -> None:
        self._graded += count

    async def _load(self) -> Classifier:
        classifier: Classifier = await self._in_thread(load_model, self.context, self._section)
        await self._in_thread(classifier.try_out)
        return classifier

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        """Run a function in the reward model's thread, because libraries keep some settings per thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(function, *arguments))


def model_names(config: RunConfig) -> dict[str, tuple[str, int]]:
    """Map the name of each reward model's Ray actor to its config section and the number of the copy."""
    return {
        model_name(section, number): (section, number)
        for section, reward in list_models(config).items()
        for number in range(reward.workers)
    }


def model_name(section: str, number: int) -> str:
    """Return the name of the Ray actor of one copy of a reward model.

    Copy 0 is named "reward-model-0" for `[reward]`, "reward-model-taste-0" for `[rewards.taste]`, and
    "reward-model-taste.parts.style-0" for the part `style` of `[rewards.taste]`.
    """
    _, _, place = section.partition(".")
    if "." in place:
        place = place.removesuffix(".scorer")
    return "-".join(filter(None, [MODEL, place, str(number)]))


def start_model(context: RunContext, section: str, number: int) -> Any:
    """Start the Ray actor of one copy of a reward model, or find the actor if it is running."""
    reward = list_models(context.config)[section]
    placed = actor_options(context.config, "reward", float(reward.cpus), gpus=reward.gpus)
    options = {"name": model_name(section, number), "lifetime": "detached", "get_if_exists": True}
    remote = ray.remote(ModelActor).options(max_concurrency=256, **options, **placed)
    return remote.remote(context, section, Lease.of(context))


class RayCopies(ModelCopies):
    """The copies of a run's reward model, found by the names of their Ray actors."""

    def __init__(self, section: str) -> None:
        self._section = section
        self._actors: dict[int, Any] = {}

    async def start(self) -> None:
        """Do nothing, because the Prefect flow of the reward stage starts the actors of reward models."""

    async def wait_ready(self, number: int) -> None:
        """Wait until the actor has loaded the model; raise `ModelAway` if there is no actor."""
        if number in self._actors:
            return
        try:
            actor = await asyncio.to_thread(ray.get_actor, model_name(self._section, number))
            await actor.begin.remote()
        except (ray.exceptions.RayError, ValueError) as error:  # `ValueError` means that no actor has this name
            raise ModelAway(
                f"{model_name(self._section, number)} cannot be reached now ({_first_line(error)})"
            ) from None
        self._actors[number] = actor

    async def grade(self, number: int, conversations: Sequence[Conversation]) -> list[Grade]:
        """Grade responses with the reward model; raise `ModelAway` if it failed or its actor died."""
        try:
            grades: list[Grade] = await self._actors[number].grade.remote(list(conversations))
        except ray.exceptions.RayError as error:
            self._actors.pop(number, None)
            raise ModelAway(
                f"the process of {model_name(self._section, number)} is gone ({_first_line(error)})"
            ) from None
        return grades


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the text that Ray adds if an actor raised the error."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
