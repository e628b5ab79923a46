"""Tests that an actor on any node finds what it needs in its run's storage: policy, tokenizer and weights."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from rollflow.flows.locations import attach_run
from rollflow.storage.errors import ConfigError, Corrupt, EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.tasks.actors.engine import EngineActor
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.policies.folder import is_weights
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.runtime.store_config import StoreConfig
from tests.support.described import describe
from tests.support.small_run import prepare_small, train_small
from tests.support.waiting import HANG_SECONDS

NO_PROBE = WeightsProbe((), (), 0.1)
CONFIG = TimedEngineConfig(
    max_concurrent_requests=4, max_new_tokens=50, median_tokens=50, sigma=0.0, seconds_per_token=0.1
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_run_starts_without_the_original_policy_folder(home: Path, kind: str) -> None:
    """The original folder may be on another machine. The run has a copy of what its actors need, and no actor fetches
    more than it needs.
    """
    store = {"uri": f"memory://{uuid.uuid4().hex}"} if kind == "memory" else {}
    context = prepare_small(home, versions=1, **store)
    before = AutoModelForCausalLM.from_pretrained(home / "policy").state_dict()
    shutil.rmtree(home / "policy")
    elsewhere = RunContext(context.uri, home / "elsewhere")
    train_small(elsewhere, until=0)
    after = AutoModelForCausalLM.from_pretrained(merged(elsewhere, home / "merged")).state_dict()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert elsewhere.tokenizer.encode("3") == context.tokenizer.encode("3")
    if kind == "memory":
        assert elsewhere.policy_folder.is_relative_to(home / "elsewhere")
        assert not any(is_weights(path.name) for path in elsewhere.policy_folder.iterdir())
    else:
        assert not (home / "elsewhere/policies").exists(), "a folder on this machine is not copied"


def merged(context: RunContext, folder: Path) -> Path:
    """Copy policy version 0 as a complete Hugging Face folder."""
    shutil.copytree(context.policy_folder, folder)
    shutil.copytree(context.weights(0), folder, dirs_exist_ok=True)
    return folder


def test_policy_without_weights_is_refused(home: Path) -> None:
    prepare_small(home, versions=1)
    (home / "policy/model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"policy\.path = '.*/policy' has no weights in safetensors format; save"):
        prepare_small(home, "another", versions=1)


def test_run_id_with_a_leftover_policy_file_is_refused(home: Path) -> None:
    """If an earlier start of the run ended during the upload of its policy, the files that it left are not mixed with
    another policy.
    """
    before = attach_run(str(home / "home/store/runs/small"))
    before.store.put("policy/chat_template.jinja", b"another policy's")
    with pytest.raises(ConfigError, match=r"run id 'small': .*chat_template\.jinja\); choose another id with --run-id"):
        prepare_small(home, versions=1)


@pytest.mark.parametrize("alpha", [0, 1.5, 4, 8])
def test_weights_being_downloaded_are_not_deleted(tmp_path: Path, alpha: float) -> None:
    """Versions may be published as far ahead as alpha allows while an engine downloads an older version; if that
    version were deleted, the engine would fail.
    """
    config = RunConfig(async_ratio=alpha, store=StoreConfig(keep_last=2))
    context = RunContext(str(tmp_path), tmp_path / "cache")
    describe(context.store, "ahead", config)
    fetched, retention = 11, context.policies.retention
    assert all(retention.keeps(fetched, latest) for latest in range(fetched, fetched + math.floor(alpha) + 1))


class Away:
    """A `WeightsSource` on a node that cannot read the weights."""

    patience = None

    def weights(self, version: int) -> Path:
        raise Corrupt("model.safetensors is not what was written")


async def test_only_an_engine_without_the_weights_fails() -> None:
    actor = EngineActor(lambda: TimedEngine(CONFIG))
    with pytest.raises(EngineFailed, match="this engine cannot be used, because it was never started"):
        await actor.stats()
    await actor.start()
    await actor.attach("me")
    for call in (actor.fetch(0, Away()), actor.update("me", 0, Away())):
        with pytest.raises(
            EngineFailed, match=r"the weights of version 0 cannot be fetched .*: model\.safetensors is not what was"
        ):
            await call


@dataclass(frozen=True)
class Late:
    """A `WeightsSource` that waits a second for its storage."""

    patience: float | None

    def weights(self, version: int) -> Path:
        time.sleep(1.0)
        return Path()


class Here:
    """A substitute for a Ray handle of an actor, which calls the actor in this process."""

    def __init__(self, actor: EngineActor) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(getattr(self._actor, method)(*given)))


async def test_engine_waits_for_storage_as_long_as_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run waits because an engine that is given up loses its requests, its process and one of its restarts."""
    monkeypatch.setattr("rollflow.tasks.actors.engine_client.FETCH_SECONDS", 0.1)
    actor = EngineActor(lambda: TimedEngine(CONFIG))
    await actor.start()
    engine = RayEngine(Here(actor))
    await engine.fetch(1, Late(patience=HANG_SECONDS))
    engine.check()
    with pytest.raises(EngineFailed, match=r"did not answer the call fetch within"):
        await engine.fetch(2, Late(patience=None))


class Fetching(TimedEngine):
    """A timed engine whose download of weights takes `seconds` seconds, and fails for the version `lacks`."""

    def __init__(self, seconds: float, lacks: int = -1) -> None:
        super().__init__(CONFIG)
        self.seconds, self.lacks = seconds, lacks
        self.made_meanwhile = 0

    async def fetch(self, version: int, weights: Path) -> None:
        before = len(self.progress({"r": 0}).get("r", ()))
        await asyncio.sleep(self.seconds)
        self.made_meanwhile = len(self.progress({"r": 0}).get("r", ())) - before
        if version == self.lacks:
            raise EngineFailed("its disk is full")


def test_engines_generate_while_they_download_weights() -> None:
    async def main() -> None:
        slow, lacking = Fetching(2.0), Fetching(0.1, lacks=1)
        for engine in (slow, lacking):
            await engine.start()
        proxy = InferenceProxy([slow, lacking], 4)
        await proxy.update(0, Path(), NO_PROBE, "continue")
        assert proxy.update_seconds == pytest.approx(CONFIG.update_seconds), "nobody stood still for it"
        running = asyncio.create_task(proxy.generate(GenerationRequest("r", ModelInput.of((1, 2)), 50, seed=1)))
        await asyncio.sleep(0.2)
        await proxy.update(1, Path(), NO_PROBE, "continue")
        made = await running
        assert set(made.generation.versions) == {0, 1}
        assert slow.made_meanwhile > 10
        assert list(proxy.failed) == [1]
        assert "its disk is full" in proxy.failed[1]

    run_virtual(main())
