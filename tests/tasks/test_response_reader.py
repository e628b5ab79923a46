"""A stored response is shown as the scorer of its prompt has read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import parse_config
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import StopReason, Trajectory
from rollflow.tasks.policies.folder import PAD
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.response_reader import ResponseReader

pytestmark = pytest.mark.long
PLAIN = {"kind": "exact", "special_tokens": False}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    return tmp_path


def context_of(**tree: Any) -> RunContext:
    return prepare(parse_config({"engine": {"kind": "timed", "max_new_tokens": 16}, **tree}), "read")


def answer_of(context: RunContext) -> Trajectory:
    """Return a response of a special token and a digit, after a prompt of one token."""
    tokens = [5, *context.tokenizer.encode_response(f"{PAD}7")]
    own = [False, *[True] * (len(tokens) - 1)]
    return Trajectory(0, 0, tokens, own, [0.0] * len(own), [0] * len(own), 1.0, "", StopReason.STOP)


def test_each_response_is_read_as_its_scorer_reads_it(home: Path) -> None:
    sources = [{"kind": "sorting"}, {"kind": "sorting", "reward": "plain"}]
    context = context_of(prompts=sources, rewards={"plain": PLAIN})
    reader, prompts, found = ResponseReader(context), context.prompts(), dict[str, str]()
    for index in range(20):
        found[prompts.prompt(index).scorer] = reader.read(index, answer_of(context))
    assert found == {"": f"{PAD}7", "plain": "7"}


def test_response_is_read_by_the_only_scorer_that_is_used(home: Path) -> None:
    """The section `[reward]`, which no source names, has other keys; the prompts need not be opened."""
    context = context_of(prompts=[{"kind": "sorting", "reward": "plain"}], rewards={"plain": PLAIN})
    reader = ResponseReader(context)
    assert reader.read(0, answer_of(context)) == "7"
    assert "_prompts" not in vars(reader)


def test_response_is_read_even_if_the_prompts_have_changed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [{"kind": "sorting"}, {"kind": "sorting", "reward": "plain"}]
    context = context_of(prompts=sources, rewards={"plain": PLAIN})

    def fail(_: RunContext) -> RunPrompts:
        raise ConfigError("the file has changed")

    monkeypatch.setattr(RunContext, "prompts", fail)
    assert ResponseReader(context).read(0, answer_of(context)) == f"{PAD}7"
