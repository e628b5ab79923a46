"""The measurement of the quick start's benchmark: two held-out sets, no shared key, plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import quick_start
from rollflow.flows.config import load_recipe
from rollflow.flows.prepare import prepare
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.sorting import SortingSource, build_question
from rollflow.tasks.run.context import RunContext
from tests.support.small_run import make_policy


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(quick_start, "POOL", 1000)
    return prepare(load_recipe(Path("flows/recipes/sorting.toml"), ["versions=10"]), "quick")


def test_held_out_questions_of_the_quick_start_are_disjoint(context: RunContext) -> None:
    first, second = quick_start.split_held_out(context)
    assert [q.text for q in first] == [prompt.text for prompt in context.prompts().held_out()]
    assert (len(first), len(second)) == (200, 200)
    assert len({q.answer for q in [*first, *second]}) == 400
    assert quick_start.count_shared_keys(context, [*first, *second]) == 0


def test_held_out_question_in_training_is_counted(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = quick_start.split_held_out(context)
    leaked, training = second[7], SortingSource.training

    def leak(self: SortingSource, position: int) -> Question:
        return build_question(leaked.text[9:4:-1]) if position == 300 else training(self, position)

    monkeypatch.setattr(SortingSource, "training", leak)
    assert quick_start.count_shared_keys(context, [*first, *second]) == 1


def test_quick_start_accuracy_uses_greedy_answers(tmp_path: Path) -> None:
    """A question counts as correct if the model's answer equals the question's answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_policy(folder := tmp_path / "policy")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [f"{a} + {a} + 1" for a in range(6)]
    said = []
    for text in asked:
        prompt = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=4)[0, prompt["input_ids"].shape[1] :]
        said.append(tokenizer.decode(tokens, skip_special_tokens=True))
    assert quick_start.measure_accuracy(folder, list(zip(asked, said, strict=True)), 4) == 1.0
    wrong = [*zip(asked[:3], said[:3], strict=True), *((text, "no such answer") for text in asked[3:])]
    assert quick_start.measure_accuracy(folder, wrong, 4) == 0.5
