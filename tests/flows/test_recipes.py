"""How overrides and refusals follow the unions of the config tree: a kind that is added is known here by itself."""

from __future__ import annotations

import json
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
from rollflow.tasks.objectives.config import Advantage, Clip, Correction, Kimi, PartsObjective
from rollflow.tasks.objectives.presets import PRESETS
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


def test_another_preset_begins_with_its_own_parts(tmp_path: Path) -> None:
    path = recipe(tmp_path, '[train.objective]\nkind = "grpo"\n[train.objective.surrogate]\nlow = 0.1\ndual = 2.0\n')
    assert load_recipe(path).train.objective == PartsObjective(surrogate=Clip(low=0.1, dual=2.0))
    found = load_recipe(path, ["train.objective.kind=cispo"]).train.objective
    assert found == PartsObjective(kind="cispo")
    assert load_recipe(path, ["train.objective.kind=grpo"]) == load_recipe(path)


def test_a_preset_is_expanded_and_its_parts_may_be_changed() -> None:
    found = parse({"train": {"objective": {"kind": "gspo", "surrogate": {"high": 0.1}}}}).train.objective
    assert isinstance(found, PartsObjective)
    assert (found.surrogate, found.ratio.level) == (Clip(low=3e-4, high=0.1), "geometric")
    assert parse({"train": {"objective": found.model_dump(mode="json")}}).train.objective == found
    given = found.model_dump(mode="json", exclude_unset=True)
    assert given == {"kind": "gspo", "surrogate": {"high": 0.1}}
    assert parse({"train": {"objective": given}}).train.objective == found
    other = parse({"train": {"objective": {"kind": "gspo", "surrogate": {"kind": "kimi"}}}}).train.objective
    assert isinstance(other, PartsObjective)
    assert other.surrogate == Kimi()


@pytest.mark.parametrize("kind", PRESETS)
def test_what_a_run_keeps_of_a_preset_is_read_as_the_same(kind: str) -> None:
    found = parse({"train": {"objective": {"kind": kind}}})
    assert parse(json.loads(json.dumps(found.model_dump(mode="json")))) == found


def test_keys_from_before_there_were_parts_are_read() -> None:
    """Runs recorded then are replayed, with the same advantages."""
    old = {
        "baseline": "group",
        "normalize": False,
        "negative_weight": 0.3,
        "aggregation": "sequence-mean",
        "objective": {"kind": "grpo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0},
    }
    assert parse({"train": old}).train.objective == PartsObjective(
        advantage=Advantage(scale="none", negative_weight=0.3),
        aggregation="sequence-mean",
        surrogate=Clip(low=0.1, high=0.3, dual=2.0),
    )
    plain = parse({"train": {**old, "baseline": "none", "normalize": True}}).train.objective
    assert plain.advantage == Advantage(baseline="none", scale="none")
    capped = {"objective": {"kind": "decoupled-ppo", "clip_low": 0.2, "clip_high": 0.28, "weight_cap": 3.0}}
    found = parse({"train": capped}).train.objective
    assert isinstance(found, PartsObjective)
    assert (found.correction.outside, found.correction.high) == ("clamp", 3.0)
    assert found.ratio.to == "proximal"
    own = parse({"train": {**old, "objective": {"kind": "import", "path": "a:b"}}}).train.objective
    assert own.aggregation == "sequence-mean"


def test_an_earlier_key_beside_a_part_changes_what_the_part_leaves_open() -> None:
    both = {"baseline": "none", "objective": {"advantage": {"negative_weight": 0.3}}}
    found = parse({"train": both}).train.objective.advantage
    assert found == Advantage(baseline="none", scale="none", negative_weight=0.3)


def test_a_key_of_another_kind_is_told_as_that() -> None:
    tree = {"train": {"objective": {"kind": "topr", "surrogate": {"dual": 2.0}}}}
    with pytest.raises(ConfigError, match=r"^train\.objective\.surrogate\.dual = 2\.0: there is no such key here"):
        parse(tree)


@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "grpo", "correction": {"outside": "clamp", "high": 5.0}},
        {"kind": "grpo", "correction": {"outside": "mask", "high": 5.0}},
        {"kind": "dppo", "correction": {"outside": "clamp", "high": 5.0}},
        {"kind": "tis", "correction": {"outside": "clamp", "high": 5.0}},
        {"kind": "kimi", "correction": {"outside": "mask"}},
    ],
)
def test_what_corrects_twice_is_refused(objective: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"^train\.objective\.correction\.outside = .* corrected twice; set ratio\.to"
    ):
        parse({"train": {"objective": objective}})
    parse({"train": {"objective": {**objective, "ratio": {"to": "proximal"}}}})


@pytest.mark.parametrize(
    ("kind", "correction", "words"),
    [
        ("grpo", {"high": 3.0}, r'high = 3\.0: .* outside = "none"; leave it out, or set outside to "clamp" or "mask"'),
        ("tis", {"low": 0.5, "judge": "geometric"}, r"low = 0\.5: it changes nothing"),
        ("decoupled-ppo", {"weigh": False}, r'weigh = False: .* outside = "clamp"; .* set outside to "mask"'),
        ("decoupled-ppo", {"judge": "sequence"}, r"judge = 'sequence': it changes nothing"),
        ("mis", {"second_moment": 0.1}, r'second_moment = 0\.1: .* set outside to "second-moment"'),
        ("m2po", {"level": "geometric"}, r"level = 'geometric': it changes nothing"),
        ("geometric-mask", {"outside": "none", "low": 0.9}, r"low = 0\.9: it changes nothing"),
    ],
)
def test_a_key_of_a_correction_that_changes_nothing_is_refused(
    kind: str, correction: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.objective\.correction\.{words}"):
        parse({"train": {"objective": {"kind": kind, "correction": correction}}})


def test_what_changes_nothing_may_be_a_preset_s_or_the_default_or_kept_by_a_run() -> None:
    parse({"train": {"objective": {"kind": "geometric-mask", "correction": {"outside": "none"}}}})
    parse({"train": {"objective": {"correction": {"weigh": True, "low": 0.0}}}})
    kept = PartsObjective(correction=Correction(high=3.0)).model_dump(mode="json")
    assert parse({"train": {"objective": kept}}).train.objective.correction == Correction(high=3.0)  # type: ignore[union-attr]


def test_what_no_kind_knows_is_refused_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.slot = 7: there is no such key; did you mean engine\.slots\?"):
        load_recipe(recipe(tmp_path, ENGINE.replace("slots", "slot")), ["engine.kind=timed"])


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"engine": {"kind": "sglang"}}, "engine.kind = 'sglang' is not one of ['vllm', 'transformers', 'timed']"),
        (
            {"prompts": [{"path": "x"}]},
            "prompts.0 = {'path': 'x'}: it has no kind;",
        ),
        ({"prompts": [{"kind": "csv"}]}, "prompts.0.kind = 'csv' is not one of ['reasoning-gym', 'jsonl', "),
        (
            {"train": {"objective": {"kind": "grpo", "clip_low": 3}}},
            "train.objective.surrogate.low = 3 is greater than the maximum of 1",
        ),
    ],
)
def test_a_refusal_names_the_key_without_the_kind(tree: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(tree)
    assert str(refused.value).startswith(words)


def test_every_kind_is_among_the_keys() -> None:
    lines = describe_keys(RunConfig)
    for line in ('engine.kind = "timed"', 'prompts.kind = "jsonl"', 'train.objective.surrogate.kind = "kimi"'):
        assert any(one.startswith(f"{line}  # ") for one in lines)


def test_a_key_says_its_default_and_what_it_may_be_as_toml_does() -> None:
    lines = {line.partition(": ")[0] for line in describe_keys(RunConfig)}
    assert {
        "versions = 100  # whole number above 0",
        "async_ratio = 2.0  # number at least 0, at most 1e+09",
        'policy.dtype = "float32"  # "float32" or "bfloat16"',
        "policy.path = unset  # text",
        "engine.prefix_caching = true  # true or false",
        "train.betas = [0.9, 0.95]  # list",
    } <= lines


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
        ({"learner": "third"}, "train.learner = 'third' is not one of ['torch', 'other']"),
        ({"learner": "other", "rank": "x"}, "train.rank = 'x' is not of type 'integer'"),
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
