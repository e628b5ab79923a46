"""Tests the token budget of a judge over restarts of the reward actor, which runs in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.objects import open_store
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.run_records.judge_usage import read_judge_usage
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.actors import reward
from rollflow.tasks.actors.reward import RewardActor
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers.base import Score
from tests.support.described import describe
from tests.support.judge_server import JudgeServer, Reply, judge_server, verdict
from tests.support.waiting import HANG_SECONDS

BUDGET = 500  # budget in tokens; the server counts 100 tokens for each call


def context_of(folder: Path, scorer: Mapping[str, Any]) -> RunContext:
    store = open_store(str(folder / "run"))
    config = RunConfig.model_validate({"policy": {"path": "p"}, "reward": scorer})
    describe(store, "budget", config)
    for name, data in build_cold_folder(ColdStart(), ["1 + 1 = 2"]).items():
        store.put(f"policy/{name}", data)
    return RunContext(str(folder / "run"), folder / "cache")


def judge_of(server: JudgeServer, **keys: Any) -> dict[str, Any]:
    keys = {"budget_tokens": BUDGET, "cache_entries": 0, "at_once": 1, "call_seconds": HANG_SECONDS, **keys}
    return {"kind": "judge", "url": server.url, "model": "m", **keys}


async def ask(actor: RewardActor, *texts: str) -> list[Score]:
    tokenizer = actor.context.tokenizer
    packed = [Int32s.of(tokenizer.encode_response(text)).data for text in texts]
    verdicts = await actor.score([(tokens, {}, "", (), (), True) for tokens in packed])
    found = list(verdicts.scores)
    while verdicts.ticket is not None:
        verdicts = await actor.await_more(verdicts.ticket)
        found += verdicts.scores
    return [Score.of_columns(columns) for _, columns in sorted(found)]


async def end(actor: RewardActor) -> None:
    """End the actor without storing its usage again, as a kill does."""
    if actor._saving:
        actor._saving.cancel()
    await (await actor._scorer.get()).close()


@pytest.mark.parametrize("section", ["reward", "reward.parts.style.scorer"])
async def test_judge_token_budget_holds_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr(reward, "SAVE_SECONDS", 0.01)
    with judge_server(lambda *_: verdict(score=5)) as server:
        judge = judge_of(server)
        parts = {"kind": "composite", "parts": {"style": {"scorer": judge}}}
        context = context_of(tmp_path, judge if section == "reward" else parts)
        for used in (200, 400):
            actor = RewardActor(context)
            await ask(actor, f"1 {used}", f"2 {used}")
            async with asyncio.timeout(HANG_SECONDS):
                while read_judge_usage(context.store, section).tokens < used:
                    await asyncio.sleep(0.01)
            await end(actor)
        actor = RewardActor(context)
        serving = asyncio.create_task(actor.run())
        with pytest.raises(ConfigError, match=rf"^{section}\.budget_tokens = 500: the judge has used 500 tokens"):
            await ask(actor, "7", "8", "9")
        with pytest.raises(ConfigError, match="budget_tokens"):
            await asyncio.wait_for(serving, HANG_SECONDS)
        await end(actor)
        assert len(server.bodies) == 5
        assert read_judge_usage(context.store, section).tokens == 500


async def test_judge_usage_is_stored_at_the_end_of_the_run(tmp_path: Path) -> None:
    with judge_server(lambda *_: verdict(score=5)) as server:
        context = context_of(tmp_path, judge_of(server))
        actor = RewardActor(context)
        serving = asyncio.create_task(actor.run())
        await ask(actor, "5")
        await actor.finish()
        assert await asyncio.wait_for(serving, HANG_SECONDS) == 1
        assert read_judge_usage(context.store, "reward").tokens == 100


async def test_older_judge_usage_never_replaces_a_newer_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends while an older record is still being written to a slow storage."""
    monkeypatch.setattr(reward, "SAVE_SECONDS", 0.01)
    with judge_server(lambda *_: verdict(score=5)) as server:
        context = context_of(tmp_path, judge_of(server))
        actor, held, goes_on, is_written = RewardActor(context), *(threading.Event() for _ in range(3))
        put = LocalStore.put

        def put_slowly(store: LocalStore, path: str, data: bytes) -> None:
            is_old = path.startswith("judge_usage") and b'"tokens": 100' in data
            if is_old:
                held.set()
                assert goes_on.wait(HANG_SECONDS)
            put(store, path, data)
            if is_old:
                is_written.set()

        monkeypatch.setattr(LocalStore, "put", put_slowly)
        serving = asyncio.create_task(actor.run())
        await ask(actor, "5")
        assert await asyncio.to_thread(held.wait, HANG_SECONDS)
        await ask(actor, "6")
        await actor.finish()
        asyncio.get_running_loop().call_later(0.3, goes_on.set)
        await asyncio.wait_for(serving, HANG_SECONDS)
        if actor._saving:
            actor._saving.cancel()
        assert await asyncio.to_thread(is_written.wait, HANG_SECONDS)
        assert read_judge_usage(context.store, "reward").tokens == 200


async def test_wrong_judge_api_key_after_a_restart_ends_the_run(tmp_path: Path) -> None:
    """A refused key ends the run unless the judge has given a verdict in the present process. Verdicts before a restart
    do not count, because the key may have changed.
    """
    with judge_server(lambda *_: verdict(score=5)) as server:
        context = context_of(tmp_path, judge_of(server))
        actor = RewardActor(context)
        await ask(actor, "5")
        await actor._store_records()
        await end(actor)
        server.behave = lambda *_: Reply("no such key", 401)
        again = RewardActor(context)
        with pytest.raises(ConfigError, match=r"^reward\.token_env"):
            await ask(again, "6")
        await end(again)
