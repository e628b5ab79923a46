"""How overrides and refusals follow the unions of the config tree: a kind that is added is known here by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from rollflow.flows.commands.cli import main
from rollflow.flows.config import describe_keys, load_recipe, parse, sentence
from rollflow.storage.errors import ConfigError
from rollflow.tasks.config import RunConfig
from rollflow.tasks.engines.config import TimedEngineConfig, TransformersEngineConfig
from rollflow.tasks.learners.config import TorchTrain, TrainBase
from rollflow.tasks.objectives.config import DecoupledPpoObjective
from rollflow.tasks.sections import Section

ENGINE = '[engine]\nkind = "vllm"\nslots = 7\nthreads = 3\nkv_cache_bytes = 4\n'


def recipe(folder: Path, text: str) -> Path:
    """A recipe file."""
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_a_section_that_changes_its_kind_keeps_what_both_know(tmp_path: Path) -> None:
    found = load_recipe(recipe(tmp_path, ENGINE), ["engine.kind=transformers"]).engine
    assert found == TransformersEngineConfig(slots=7, threads=3)
    assert load_recipe(tmp_path / "recipe.toml", ["engine.kind=timed"]).engine == TimedEngineConfig(slots=7)


def test_so_does_one_deeper_in_the_tree(tmp_path: Path) -> None:
    path = recipe(tmp_path, '[train.objective]\nkind = "grpo"\nclip_low = 0.1\ndual_clip = 2.0\n')
    found = load_recipe(path, ["train.objective.kind=decoupled-ppo"]).train.objective
    assert found == DecoupledPpoObjective(clip_low=0.1)


def test_what_no_kind_knows_is_refused_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.slot = 7: there is no such key; did you mean engine\.slots\?"):
        load_recipe(recipe(tmp_path, ENGINE.replace("slots", "slot")), ["engine.kind=timed"])


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"engine": {"kind": "sglang"}}, "engine.kind = 'sglang': choose one of 'vllm', 'transformers', 'timed'"),
        (
            {"prompts": [{"path": "x"}]},
            "prompts.0 = {'path': 'x'}: it has no kind;",
        ),
        ({"prompts": [{"kind": "csv"}]}, "prompts.0.kind = 'csv': choose one of 'reasoning-gym', 'jsonl'"),
        ({"train": {"objective": {"kind": "grpo", "clip_low": 3}}}, "train.objective.clip_low = 3: input should be"),
    ],
)
def test_a_refusal_names_the_key_without_the_kind(tree: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(tree)
    assert str(refused.value).startswith(words)


def test_every_kind_is_among_the_keys() -> None:
    lines = describe_keys(RunConfig)
    for line in ("engine.kind = 'timed'", "prompts.kind = 'jsonl'", "train.objective.kind = 'decoupled-ppo'"):
        assert any(one.startswith(f"{line}  # ") for one in lines)


def test_a_section_that_names_no_kind_has_the_default() -> None:
    tree = {"engine": {"slots": 9}, "reward": {"workers": 2}, "train": {"objective": {"clip_low": 0.1}}}
    assert parse(tree) == parse(
        {
            "engine": {"kind": "vllm", "slots": 9},
            "reward": {"kind": "reasoning-gym", "workers": 2},
            "train": {"objective": {"kind": "grpo", "clip_low": 0.1}},
        }
    )


class Other(TrainBase):
    """Another learner."""

    learner: Literal["other"] = "other"
    rank: int = 1


class Tree(Section):
    """A config in which there are two kinds of learners."""

    train: Annotated[TorchTrain | Other, Field(discriminator="learner")] = TorchTrain()


def test_of_two_learners_the_key_learner_says_which() -> None:
    assert Tree.model_validate({"train": {"threads": 2}}).train == TorchTrain(threads=2)
    assert Tree.model_validate({"train": {"learner": "other", "rank": 3}}).train == Other(rank=3)
    for wrong, words in (
        ({"learner": "third"}, "train.learner = 'third': choose one of 'torch', 'other'"),
        ({"learner": "other", "rank": "x"}, "train.rank = 'x': input should be"),
        ({"learner": "other", "threads": 2}, "train.threads = 2: there is no such key"),
    ):
        with pytest.raises(ValidationError) as refused:
            Tree.model_validate({"train": wrong})
        assert sentence(refused.value.errors()[0], Tree).startswith(words)


def test_a_run_that_was_recorded_before_says_its_learner_as_now() -> None:
    tree = RunConfig().model_dump(mode="json")
    assert tree["train"]["learner"] == "torch"
    assert RunConfig.model_validate(tree).sha256() == RunConfig().sha256()
    assert main(["check", "flows/recipes/arithmetic.toml", "--set", "train.learner=torch"]) == 0
    assert main(["check", "flows/recipes/arithmetic.toml", "--set", "train.learner=jax"]) == 2
