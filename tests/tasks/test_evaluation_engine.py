"""Tests that the evaluation engine can run the policy. On a CPU, it is the transformers engine if this can run the
policy, and otherwise an engine of the run's own kind.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.flows.config import parse_config
from rollflow.flows.preflight import preflight
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors import run_engines
from rollflow.tasks.run.config import RunConfig
from tests.support.policy_folders import make_folder, recipe_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))


def on_vllm(folder: Path, evaluation: str) -> RunConfig:
    tree = recipe_of(folder).model_dump(mode="json", exclude_unset=True)
    engine = {"kind": "vllm", "max_new_tokens": 8}
    return parse_config({**tree, "engine": engine, "evaluation": {"prompts": 4, "engine": evaluation}})


@pytest.mark.parametrize(
    ("kind", "changes", "runs"),
    [("llama", {}, True), ("gpt2", {}, False), ("gemma2", {"layer_types": ["sliding_attention"] * 2}, False)],
)
def test_separate_evaluation_engine_can_run_the_policy(
    tmp_path: Path, kind: str, changes: dict[str, object], *, runs: bool
) -> None:
    folder = make_folder(tmp_path / "policy", kind, **changes)
    auto = prepare(on_vllm(folder, "auto"), "auto")
    assert auto.evaluation_engine(on_cpu=True).kind == ("transformers" if runs else "vllm")
    assert auto.evaluation_engine(on_cpu=False) == auto.config.engine
    chosen = on_vllm(folder, "transformers")
    if runs:
        assert prepare(chosen, "chosen").evaluation_engine(on_cpu=False).kind == "transformers"
    else:
        with pytest.raises(
            ConfigError, match=f'cannot run a model of type {kind} .*; set evaluation.engine = "own", or'
        ):
            preflight(chosen)


def test_evaluations_run_on_the_separate_evaluation_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    actor = SimpleNamespace(remote=lambda build, *_: started.append(build.args[1]))
    monkeypatch.setattr(run_engines.ray, "remote", lambda _: SimpleNamespace(options=lambda **_: actor))
    context = prepare(on_vllm(make_folder(tmp_path / "policy", "gpt2"), "auto"), "gpt2")
    run_engines.start_engine(context, run_engines.EVALUATION, 0.0)
    assert started == [context.config.engine]
