"""Tests of evaluation sets: files that are held out, kept with the run, and evaluated under a name of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rollflow.flows.config import parse_config
from rollflow.flows.locations import attach_run
from rollflow.flows.registration.recipe_paths import anchor_paths
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.objects.memory import MemoryStore
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.rollout.evaluation import DomainResult, Evaluator, read_evaluation, store_evaluation
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.run.expectations import expected_of
from rollflow.tasks.run.prompt_check import read_files
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.pipeline import prompt_at
from tests.support.small_run import prepare_small

TRAINED = [f"What is {n} + 1?" for n in range(30)]
HARD = ["How much is 9?", "what is 3 + 1", "How much is 8?", "How much is 9?"]
EASY = ["What is 4 + 1?", "How much is 7?"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))


def write(folder: Path, name: str, questions: Sequence[str], column: str = "question") -> str:
    (folder / name).write_text("".join(json.dumps({column: text, "answer": "1"}) + "\n" for text in questions))
    return str(folder / name)


def source_of(folder: Path, **keys: Any) -> dict[str, Any]:
    """Describe a source with two evaluation sets; the second one names its column of questions differently."""
    easy = {"path": write(folder, "easy.jsonl", EASY, "problem"), "columns": {"question": "problem"}, "prompts": 1}
    sets = {"hard": {"path": write(folder, "hard.jsonl", HARD)}, "easy": easy}
    return {"kind": "file", "path": write(folder, "train.jsonl", TRAINED), "evaluation_sets": sets, **keys}


def test_evaluation_sets_are_held_out_and_keep_their_order(tmp_path: Path) -> None:
    prompts = prepare_small(tmp_path, versions=1, prompts=[source_of(tmp_path)]).prompts()
    sets = prompts.evaluation_sets()
    assert {name: [prompt.text for prompt in found] for name, found in sets.items()} == {
        "hard": HARD[:3],
        "easy": EASY[:1],
    }
    assert {prompt.domain for prompt in sets["easy"]} == {"easy"}
    held_out = prompts.held_out()
    indices = [prompt.index for prompt in [*held_out, *sets["hard"], *sets["easy"]]]
    assert len(set(indices)) == len(indices), "requests of an evaluation have different ids"
    trained = {prompts.prompt(index).text for index in range(200)}
    assert trained == set(TRAINED) - {"What is 3 + 1?", "What is 4 + 1?"} - {prompt.text for prompt in held_out}


def test_run_stores_the_questions_of_its_evaluation_sets(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    context = prepare_small(tmp_path, versions=1, prompts=[source], keep_prompts_bytes=0)
    before = context.prompts().evaluation_sets()
    for one in source["evaluation_sets"].values():
        Path(one["path"]).unlink()
    again = attach_run(context.uri)
    assert again.prompts().evaluation_sets() == before
    expected = expected_of(again)
    assert expected.prompts is not None
    assert {prompt.id for found in before.values() for prompt in found} <= set(expected.prompts.held_out.values())
    assert audit(context.store, deep=True).clean
    [pin] = context.created.prompts
    context.store.put(pin["evaluation_sets"]["hard"]["kept"], b"{}")
    assert [one.where for one in audit(context.store, deep=True).violations] == [pin["evaluation_sets"]["hard"]["kept"]]
    with pytest.raises(Corrupt, match="was altered"):
        attach_run(context.uri).prompts()


def test_rows_of_evaluation_sets_are_checked_before_the_run(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    write(tmp_path, "hard.jsonl", [*HARD, " "])
    config = parse_config({"prompts": [source], "reward": {"kind": "exact"}})
    with pytest.raises(ConfigError, match=r"hard.path = .*line 5: question is empty"):
        read_files(config, read_file)


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ({"a b": {"path": "x.jsonl"}}, "has letters, digits"),
        ({"train": {"path": "x.jsonl"}}, "another set or source has this name"),
        ({"x": {}}, "needs a path or a split"),
        ({"x": {"path": "x.jsonl", "prompts": 0}}, "prompts"),
    ],
)
def test_invalid_evaluation_sets_are_refused(tmp_path: Path, sets: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config({"prompts": [source_of(tmp_path, evaluation_sets=sets)], "reward": {"kind": "exact"}})


def test_evaluation_set_name_must_be_unique(tmp_path: Path) -> None:
    first = source_of(tmp_path)
    second = {**first, "path": write(tmp_path, "other.jsonl", TRAINED)}
    with pytest.raises(ConfigError, match="another set or source has this name"):
        parse_config({"prompts": [first, second], "reward": {"kind": "exact"}})


def test_paths_of_evaluation_sets_are_relative_to_the_recipe() -> None:
    source = {"kind": "file", "path": "a.jsonl", "evaluation_sets": {"x": {"path": "b.jsonl"}, "y": {"split": "test"}}}
    anchor_paths({"prompts": [source]}, Path("/recipes"))
    assert source["evaluation_sets"] == {"x": {"path": "/recipes/b.jsonl"}, "y": {"split": "test"}}


def test_evaluation_reports_each_set_beside_the_accuracy() -> None:
    async def score(request: ScoreRequest) -> Score:
        return Score(float(request.reference["right"]), "")

    async def main() -> Any:
        engine = TimedEngine(TimedEngineConfig(max_new_tokens=8))
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), WeightsProbe((), (), 0.1), "continue")

        def prompts(first: int, rights: Sequence[int], domain: str) -> list[Any]:
            numbered = enumerate(rights, first)
            return [replace(prompt_at(one), domain=domain, reference={"right": right}) for one, right in numbered]

        sets = {"hard": prompts(4, [0, 0, 1], "hard"), "easy": prompts(7, [1], "easy"), "empty": []}
        return await Evaluator(prompts(0, [1, 0, 1, 1], "main"), 2, 1.0, 8, score, sets=sets).run(proxy, 0)

    found = run_virtual(main())
    assert (found.accuracy, found.responses, found.pinned) == (0.75, 8, True)
    assert found.domains == {}
    assert found.sets == {"hard": DomainResult(1 / 3, 1 / 3, 6), "easy": DomainResult(1.0, 1.0, 2)}
    assert found.metrics["accuracy_hard"] == pytest.approx(1 / 3)
    run = MemoryStore(uuid4().hex)
    store_evaluation(run, found)
    assert read_evaluation(run, 0) == found
