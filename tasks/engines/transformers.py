"""Runs plain Hugging Face models as an inference engine, for machines without vLLM and for bit-reproducible runs.

- A response depends only on the weights and on its request, including the seed (see `fixed_shape`). A response does not
  depend on other requests.
- A weight update computes the KV cache of running requests again, so every token comes from the weights of a single
  policy version.

One thread owns the model and runs one generation step at a time, so the model needs no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, TokenSpan
from rollflow.tasks.engines.config import TransformersEngineConfig
from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.policies.stop import stop_tokens
from rollflow.tasks.runtime.gc_tuning import pause_collector

if TYPE_CHECKING:
    from rollflow.tasks.engines.fixed_shape import FixedShapeSampler, RunningRow

Result = TypeVar("Result")


class TransformersEngine:
    """An inference engine that runs a Hugging Face model in one thread."""

    def __init__(
        self,
        config: TransformersEngineConfig,
        policy_folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        self._config = config
        self._folder = policy_folder
        self._dtype = dtype
        self._version = -1
        self._loaded = -1  # policy version of the model's weights; -1 while weights are loaded
        self._suspended = False
        self._dead: str | None = "the transformers engine was never started"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers-engine")
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._rows: dict[str, RunningRow] = {}  # running requests, which stay in this map after the engine's death
        self._driver: asyncio.Task[None] | None = None
        self._sampler: FixedShapeSampler

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._dead = None
        self._sampler = await self._on_thread(self._build_sampler)

    def _build_sampler(self) -> FixedShapeSampler:
        with pause_collector():
            disable_optional_libraries()
            import torch

            from rollflow.tasks.engines.fixed_shape import FixedShapeSampler

        torch.set_num_threads(self._config.threads)
        dtype = torch.float32 if self._dtype == "float32" else torch.bfloat16
        return FixedShapeSampler(self._folder, dtype, self._config.max_concurrent_requests, stop_tokens(self._folder))

    async def generate(self, request: GenerationRequest) -> Generation:
        self.check()
        if request.id in self._waiting:
            raise ValueError(f"request {request.id!r} is already running; give each request its own id")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        try:
            self._rows[request.id] = await self._on_thread(lambda: self._sampler.add(request))
            self._drive()
            return await future
        except asyncio.CancelledError:
            if self._dead is None:
                self._thread.submit(self._sampler.abort, [request.id])
            raise
        finally:
            self._waiting.pop(request.id, None)
            if self._dead is None:
                self._rows.pop(request.id, None)

    async def abort(self, ids: Sequence[str]) -> None:
        self._settle(await self._on_thread(lambda: self._sampler.abort(ids)))

    async def suspend(self, in_flight: InFlight) -> None:
        self._suspended = True
        if self._driver is not None:
            await asyncio.wait([self._driver])
        if in_flight == "restart":
            self._settle(await self._on_thread(lambda: self._sampler.abort(None)))
        self.check()

    async def fetch(self, version: int, weights: Path) -> None:
        pass  # the weights are on this node already

    async def update(self, version: int, weights: Path) -> None:
        before, self._loaded = self._loaded, -1  # if this update fails, the next update loads all weights
        await self._on_thread(lambda: self._sampler.load(weights, before, version))
        self._version = self._loaded = version

    async def resume(self) -> None:
        self.check()
        self._suspended = False
        self._drive()

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        return await self._on_thread(lambda: self._sampler.logprobs(tokens))

    def check(self) -> None:
        if self._dead is not None:
            raise EngineFailed(self._dead)

    def progress(self, have: Mapping[str, int]) -> dict[str, TokenSpan]:
        found = ((id, self._rows.get(id), since) for id, since in have.items())
        return {id: row.progress().after(since) for id, row, since in found if row is not None}

    async def close(self) -> None:
        self._mark_dead("the transformers engine is closed")
        if self._driver is not None:
            await asyncio.wait([self._driver])
        await asyncio.to_thread(self._thread.shutdown)

    def _drive(self) -> None:
        """Start the loop of generation steps, unless the loop is already running."""
        if self._suspended or self._dead is not None or (self._driver is not None and not self._driver.done()):
            return
        self._driver = asyncio.create_task(self._run_steps())
        self._driver.add_done_callback(self._handle_driver_end)

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._suspended and self._dead is None and self._sampler.busy:
            self._settle(await loop.run_in_executor(self._thread, self._sampler.step, self._version))

    def _handle_driver_end(self, driver: asyncio.Task[None]) -> None:
        if driver.cancelled():
            self._mark_dead("the transformers engine was cancelled")
        elif (error := driver.exception()) is not None:
            self._mark_dead(f"a step of the transformers engine failed: {error!r}")
        elif self._sampler.busy:
            self._drive()  # a request arrived while the loop was ending

    def _settle(self, ended: Iterable[Generation]) -> None:
        for generation in ended:
            future = self._waiting.get(generation.id)
            if future is not None and not future.done():
                future.set_result(generation)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        self.check()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _mark_dead(self, why: str) -> None:
        self._dead = self._dead or why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineFailed(self._dead))
