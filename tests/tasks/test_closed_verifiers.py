"""Tests that a process that calls a verifier directly also closes the verifier, so that no sandbox process is left."""

from __future__ import annotations

import asyncio
import types
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import parse_config
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run import held_out_accuracy
from rollflow.tasks.run.held_out_accuracy import HeldOutJudge
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.config import CompositeReward
from rollflow.tasks.scorers.verifier import Verifier, close_in_thread, score_response
from rollflow.tasks.scorers.worker import REWARD
from tests.support.sandbox_processes import list_boxes
from tests.support.user_code import put_in_reach

CODE = {"kind": "code", "fenced": False, "sandbox": {"kind": "unsafe-process"}}
ROW = {"cases": [{"stdin": "", "stdout": "7"}]}


def verifier_of(**keys: Any) -> Verifier:
    return build_verifier(REWARD.validate_python(keys))


@pytest.mark.parametrize("is_part", [False, True])
def test_closed_verifier_leaves_no_process(is_part: bool) -> None:
    before = list_boxes()
    parts = {"program": {"scorer": CODE}, "text": {"weight": 0.0}}
    verify = verifier_of(**({"kind": "composite", "parts": parts} if is_part else CODE))
    for _ in range(2):  # a closed verifier may be used again
        assert score_response(verify, "all", "print(7)", {**ROW, "answer": "print(7)"}).value == 1.0
        assert len(list_boxes()) > len(before)
        close_in_thread([verify])
        assert list_boxes() == before


def test_verifier_without_a_close_method_can_be_closed() -> None:
    close_in_thread([verifier_of(kind="exact")])


def test_runner_is_closed_even_if_closing_a_verifier_fails() -> None:
    def fail() -> None:
        raise OSError("broken")

    verify = Verifier(lambda response, reference: 1.0, end=fail)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            close_in_thread([verify])


@pytest.mark.long
def test_cold_start_leaves_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    source = {"kind": "import", "path": "rollflow.tasks.prompts.domains:LinePrograms"}
    tree: dict[str, Any] = {"prompts": [source], "reward": CODE, "evaluation": {"prompts": 2}}
    tree["engine"] = {"kind": "timed", "max_new_tokens": 32}
    context, before = prepare(parse_config(tree), "cold"), list_boxes()
    answer = context.tokenizer.encode_response("x=1")
    monkeypatch.setattr(held_out_accuracy, "generate_answers", lambda model, asked, *_: [answer] * len(asked))
    with HeldOutJudge(context) as measure:
        assert measure(None).mean == 0.0
        assert len(list_boxes()) > len(before)
    assert list_boxes() == before


OWN = """
from rollflow.tasks.scorers.base import Score

ended = []

def plain(response: str, reference: dict) -> Score:
    return Score(1.0)

async def waits(response: str, reference: dict) -> Score:
    return Score(1.0)

async def end() -> None:
    ended.append("waits")

def wrong(response: str, reference: dict) -> Score:
    return Score(1.0)

plain.close = lambda: ended.append("plain")
waits.close = end
wrong.close = 3
"""


def test_user_defined_scorer_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closing.py").write_text(OWN)
    put_in_reach(monkeypatch, tmp_path)
    import closing  # type: ignore[import-not-found]

    assert isinstance(closing, types.ModuleType)
    own = {name: {"kind": "import", "path": f"closing:{name}"} for name in ("plain", "waits", "wrong")}
    asyncio.run(verifier_of(**own["plain"]).close())
    parts = {name: {"scorer": own[name]} for name in ("plain", "waits")}
    close_in_thread([build_verifier(CompositeReward.model_validate({"parts": parts}))])
    assert closing.ended == ["plain", "plain", "waits"]
    with pytest.raises(ConfigError, match=r"^reward\.path = 'closing:wrong': close must be a function"):
        verifier_of(**own["wrong"])
