"""The reward pool with real worker processes: after a deadline, a death or a failure, the response still gets a
score.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from tokenizers import Tokenizer

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.runtime.actor_warnings import Warnings
from rollflow.tasks.scorers.base import ScoreRequest
from rollflow.tasks.scorers.config import ImportReward, ReasoningGymReward
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.reasoning_gym import family_score
from rollflow.tasks.scorers.verifier import answer_of
from rollflow.tasks.scorers.worker_process import WorkerProcess
from tests.support.user_code import put_in_reach
from tests.support.waiting import HANG_SECONDS, soon

ODD_WORKER = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    reference = json.loads(line)["reference"]
    if reference.get("sleep"): time.sleep(reference["sleep"])
    while reference.get("until") and not os.path.exists(reference["until"]): time.sleep(0.01)
    if reference.get("die") and not os.path.exists(reference["die"]):
        open(reference["die"], "w").close()
        os.kill(os.getpid(), 9)
    if reference.get("always_die"): os._exit(3)
    if reference.get("says"): print(reference["says"] * reference.get("times", 1), flush=True)
    print(json.dumps([1.0, "fine", "correct", {}, 0.0]), flush=True)
"""
WARNING_VERIFIER = """
import logging
from rollflow.tasks.scorers.base import Score

def judge(response: str, reference: dict[str, int]) -> Score:
    logging.getLogger("judge").warning("no gold answer to question %d", reference["question"])
    return Score(1.0, "")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(), ["1 + 1 = 2"] * 10).items():
        (path / name).write_bytes(data)
    return path


async def scores(pool: RewardPool, requests: list[ScoreRequest]) -> list[tuple[float, str]]:
    await pool.start()
    try:
        return [(s.value, s.reason) for s in await asyncio.wait_for(pool.score(requests), HANG_SECONDS)]
    finally:
        await pool.close()


def odd_pool(folder: Path, deadline: float, workers: int = 1, **more: Any) -> RewardPool:
    pool = RewardPool(ReasoningGymReward(deadline_seconds=deadline, workers=workers, **more), folder)
    pool._command = [sys.executable, "-c", ODD_WORKER]
    return pool


@pytest.mark.long
async def test_reasoning_gym_scores_its_own_answers(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    entries = [reasoning_gym.create_dataset("chain_sum", seed=3, size=20)[i] for i in range(8)]
    requests = []
    for entry in entries:
        reference = {"family": "chain_sum", "answer": entry["answer"], "metadata": entry["metadata"]}
        for text in (f" {entry['answer']}", " 1000001", ""):
            requests.append(ScoreRequest(tokenizer.encode(text).ids, reference))
    found = await scores(RewardPool(ReasoningGymReward(), folder), requests)
    assert found[0::3] == [(1.0, "right")] * 8
    assert all(reward < 1.0 for reward, _ in found[1::3] + found[2::3])


@pytest.mark.long
def test_arc_answer_read_from_json_is_scored_as_correct() -> None:
    for family in ("arc_agi", "rearc"):
        entry = reasoning_gym.create_dataset(family, seed=3, size=1)[0]
        reference = {"family": family, "answer": entry["answer"], "metadata": entry["metadata"]}
        stored = json.loads(json.dumps(reference))
        assert family_score(entry["answer"], stored).value == 1.0
        assert family_score(entry["answer"].replace("8", "1"), stored).value < 1.0


@pytest.mark.soak
def test_reference_answer_of_each_task_family_is_correct() -> None:
    families = sorted(set(DATASETS) - {"composite"})
    with_answer = 0
    for family in families:
        entry = reasoning_gym.create_dataset(family, seed=11, size=1)[0]
        if entry["answer"] is None:  # the family accepts any answer that follows its rules
            continue
        reference = {"family": family, "answer": entry["answer"], "metadata": entry["metadata"]}
        assert family_score(str(entry["answer"]), json.loads(json.dumps(reference))).value == 1.0, family
        with_answer += 1
    assert with_answer >= 100


@pytest.mark.long
async def test_reward_worker_is_ready_once_its_verifier_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose imports took longer than a score may take would give its first response a score of 0."""
    (tmp_path / "reasoning_gym.py").write_text(
        "import time\ntime.sleep(2.5)\ndef get_score_answer_fn(family): return lambda response, reference: 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path]))
    pool = RewardPool(ReasoningGymReward(deadline_seconds=2.0), folder)
    assert await scores(pool, [ScoreRequest([5], {"family": "any", "answer": "1"})]) == [(1.0, "right")]


@pytest.mark.long
async def test_verifier_exception_is_recorded_as_the_reason(folder: Path) -> None:
    requests = [ScoreRequest([5], {"family": "no such family", "answer": "1"})] * 2
    found = await scores(RewardPool(ReasoningGymReward(), folder), requests)
    assert [reward for reward, _ in found] == [0.0, 0.0]
    assert all("verifier failed" in reason for _, reason in found)


@pytest.mark.long
async def test_hanging_verifier_is_stopped_at_its_deadline(folder: Path) -> None:
    pool = odd_pool(folder, deadline=3.0)
    await pool.start()
    assert (await pool.score([ScoreRequest([], {})]))[0].value == 1.0
    hung, good = await pool.score([ScoreRequest([], {"sleep": 60}), ScoreRequest([], {})])
    await pool.close()
    assert (hung.value, hung.reason) == (0.0, "deadline: no verdict in 3 s")
    assert good.value == 1.0
    assert pool.usage.timeouts == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("place", [0, 20])
async def test_slow_score_does_not_delay_other_workers(folder: Path, tmp_path: Path, workers: int, place: int) -> None:
    """All other responses get their scores before a slow score ends, in any place among them."""
    pool = odd_pool(folder, deadline=250, workers=workers)
    await pool.start()
    try:
        requests = [ScoreRequest([], {})] * 100
        await asyncio.wait_for(pool.score(requests), 120)  # the pool measures its pace, then sends many
        requests[place] = ScoreRequest([], {"until": str(tmp_path / "now")})
        verdicts = [asyncio.ensure_future(pool.score([request])) for request in requests]
        slow = verdicts.pop(place)
        await asyncio.wait_for(asyncio.gather(*verdicts), 120)
        assert not slow.done()
        (tmp_path / "now").touch()
        assert [score.value for score in await asyncio.wait_for(slow, 60)] == [1.0]
        assert (await asyncio.wait_for(pool.score([ScoreRequest([], {})] * 100), 60))[-1].value == 1.0
        assert (pool.usage.scored, pool.usage.timeouts) == (300, 0)
    finally:
        await pool.close()


@pytest.mark.long
async def test_two_slow_scores_of_a_call_end_at_their_deadlines(folder: Path) -> None:
    pool = odd_pool(folder, deadline=3.0)
    await pool.start()
    try:
        await asyncio.wait_for(pool.score([ScoreRequest([], {})] * 100), 120)
        requests = [ScoreRequest([], {"sleep": 600} if place in (0, 5, 6) else {}) for place in range(40)]
        found = await asyncio.wait_for(pool.score(requests), 120)
        assert [place for place, score in enumerate(found) if not score.value] == [0, 5, 6]
        assert (pool.usage.scored, pool.usage.timeouts) == (140, 3)
    finally:
        await pool.close()


async def test_dead_reward_worker_is_replaced_and_its_response_retried(folder: Path, tmp_path: Path) -> None:
    once = ScoreRequest([], {"die": str(tmp_path / "died")})
    always = ScoreRequest([], {"always_die": True})
    found = await scores(odd_pool(folder, deadline=HANG_SECONDS, workers=2), [once, always, ScoreRequest([], {})])
    assert found == [(1.0, "fine"), (0.0, "the reward worker died twice on this response"), (1.0, "fine")]


async def test_reward_workers_start_early_and_after_deaths(folder: Path) -> None:
    """Workers start early, because their imports take seconds."""
    before = set(psutil.Process().children())
    pool = odd_pool(folder, deadline=HANG_SECONDS, workers=2)
    await pool.start()
    try:
        await soon(lambda: len(set(psutil.Process().children()) - before) == 2)
        workers = set(psutil.Process().children()) - before
        for worker in workers:
            worker.kill()
        await soon(lambda: not any(worker.is_running() for worker in workers))
        await asyncio.sleep(1.0)  # asyncio hears of the death from a thread
        assert [score.reason for score in await pool.score([ScoreRequest([], {})] * 3)] == ["fine"] * 3
    finally:
        await pool.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("worker", "start_seconds", "words"),
    [
        ("print('RuntimeError: no judge here')", HANG_SECONDS, "RuntimeError: no judge here"),
        ("raise SystemExit(3)", HANG_SECONDS, "the scorer's worker process ended with exit code 3"),
        (
            "import time; time.sleep(600)",
            0.2,
            r"the scorer's worker process did not start within reward\.start_seconds = 0\.2; set more seconds",
        ),
    ],
)
async def test_reward_workers_that_never_get_ready_fail_the_run(
    folder: Path, worker: str, start_seconds: float, words: str
) -> None:
    """If the pool did not fail, every response would score 0, in a run whose audit is clean."""
    pool = odd_pool(folder, deadline=HANG_SECONDS, workers=2, start_seconds=start_seconds)
    pool._command = [sys.executable, "-c", worker]
    await pool.start()
    sentence = rf"^reward\.kind = 'reasoning-gym': 10 workers in a row did not get ready; the last one: {words}$"
    try:
        asked = pool.submit([ScoreRequest([], {})] * 3)
        with pytest.raises(ConfigError, match=sentence):
            await asyncio.wait_for(pool.serve(asyncio.Event()), HANG_SECONDS)
        for one in asked:
            with pytest.raises(ConfigError, match=sentence):
                await asyncio.wait_for(one, HANG_SECONDS)
        assert pool.usage.scored == 0
    finally:
        await pool.close()


async def test_late_reward_worker_loses_no_score(folder: Path, tmp_path: Path) -> None:
    fails = f"""
import os, sys
path = {str(tmp_path / "tries")!r}
with open(path, "a") as file: file.write("x")
if os.path.getsize(path) < 4: sys.exit(1)
"""
    pool = odd_pool(folder, deadline=HANG_SECONDS)
    pool._command = [sys.executable, "-c", fails + ODD_WORKER]
    assert await scores(pool, [ScoreRequest([], {})] * 3) == [(1.0, "fine")] * 3


async def test_reward_workers_serve_until_the_run_is_finished(folder: Path) -> None:
    pool, finished = odd_pool(folder, deadline=HANG_SECONDS), asyncio.Event()
    await pool.start()
    serving = asyncio.create_task(pool.serve(finished))
    assert [score.value for score in await pool.score([ScoreRequest([], {})])] == [1.0]
    assert not serving.done()
    finished.set()
    await asyncio.wait_for(serving, HANG_SECONDS)
    assert all(lane.done() for lane in pool._lanes)


@pytest.mark.parametrize("odd", [{"says": "x", "times": 100_000}, {"says": "hello"}, {"says": "[1, 2, 3, 4]"}])
async def test_reward_worker_with_invalid_output_is_replaced(folder: Path, odd: dict[str, Any]) -> None:
    requests = [ScoreRequest([], reference) for reference in ({}, odd, {})]
    found = await scores(odd_pool(folder, deadline=HANG_SECONDS), requests)
    assert found == [(1.0, "fine"), (0.0, "the reward worker died twice on this response"), (1.0, "fine")]


async def test_reward_request_that_cannot_be_sent_delays_no_other(folder: Path) -> None:
    odd = [ScoreRequest(["a", {1}], {}), ScoreRequest([], {"answer": {1}}), ScoreRequest(None, {})]  # type: ignore[arg-type, list-item]
    found = await scores(odd_pool(folder, deadline=HANG_SECONDS), [*odd, ScoreRequest([], {})])
    assert [reward for reward, _ in found] == [0.0, 0.0, 0.0, 1.0]
    assert all(reason.startswith("request failed: TypeError: ") for _, reason in found[:3])


async def test_failed_start_of_a_reward_worker_loses_no_score(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process cannot start, for example with a full process table, no response loses its score."""
    start, refusals = WorkerProcess.start, [BlockingIOError(errno.EAGAIN, "no more processes")] * 3

    async def refused(command: Sequence[str]) -> WorkerProcess:
        if refusals:
            raise refusals.pop()
        return await start(command)

    monkeypatch.setattr(WorkerProcess, "start", refused)
    assert await scores(odd_pool(folder, deadline=HANG_SECONDS), [ScoreRequest([], {})] * 5) == [(1.0, "fine")] * 5
    assert not refusals


@pytest.mark.long
async def test_reward_worker_ends_with_its_parent_process(folder: Path) -> None:
    pool = RewardPool(ReasoningGymReward(), folder)
    process = (await WorkerProcess.start(pool._command))._process
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), HANG_SECONDS) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_answer_is_the_content_of_the_last_tag() -> None:
    text = "so <answer>3</answer> no, <answer> 4 </answer>"
    assert answer_of(text, "tag") == "4"
    assert answer_of(" 4 ", "all") == "4"
    assert answer_of("no tag", "tag") == ""


@pytest.mark.long
async def test_verifier_warnings_reach_the_pools_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warning_verifier.py").write_text(WARNING_VERIFIER)
    put_in_reach(monkeypatch, tmp_path)
    heard = Warnings("reward")
    pool = RewardPool(ImportReward(path="warning_verifier:judge", workers=2), folder)
    found = await scores(pool, [ScoreRequest((), {"question": number}) for number in range(4)])
    assert [reward for reward, _ in found] == [1.0] * 4, found
    try:
        (one,) = (one for one in heard.read() if "no gold answer" in one.text)  # one for all questions
    finally:
        logging.getLogger().removeHandler(heard)
        logging.captureWarnings(False)
    assert (one.actor, one.text[:-1]) == ("reward", "a reward worker: no gold answer to question ")
