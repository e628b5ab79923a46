"""Tests overrides and errors for config sections that have several kinds. The code finds the kinds in the config's
types.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.config import describe_error, load_recipe, parse_config
from rollflow.flows.config_keys import describe_keys
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import TimedEngineConfig, TransformersEngineConfig
from rollflow.tasks.learners.config import TorchTrain, TrainBase
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.config import Correction, PartsObjective, Penalties
from rollflow.tasks.objectives.presets import PRESETS
from rollflow.tasks.objectives.surrogate_config import Clip, Kimi, Ratio
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section

ENGINE = '[engine]\nkind = "vllm"\nmax_concurrent_requests = 7\nthreads = 3\nkv_cache_bytes = 4\n'


def recipe(folder: Path, text: str) -> Path:
    """Write a recipe file."""
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_changed_section_kind_keeps_common_keys(tmp_path: Path) -> None:
    found = load_recipe(recipe(tmp_path, ENGINE), ["engine.kind=transformers"]).engine
    assert found == TransformersEngineConfig(max_concurrent_requests=7, threads=3)
    assert load_recipe(tmp_path / "recipe.toml", ["engine.kind=timed"]).engine == TimedEngineConfig(
        max_concurrent_requests=7
    )


def test_changed_objective_preset_resets_its_parts(tmp_path: Path) -> None:
    path = recipe(tmp_path, '[train.objective]\nkind = "grpo"\n[train.objective.surrogate]\nlow = 0.1\ndual = 2.0\n')
    assert load_recipe(path).train.objective == PartsObjective(surrogate=Clip(low=0.1, dual=2.0))
    found = load_recipe(path, ["train.objective.kind=cispo"]).train.objective
    assert found == PartsObjective(kind="cispo")
    assert load_recipe(path, ["train.objective.kind=grpo"]) == load_recipe(path)


def test_objective_preset_is_expanded_and_can_be_changed() -> None:
    found = parse_config({"train": {"objective": {"kind": "gspo", "surrogate": {"high": 0.1}}}}).train.objective
    assert isinstance(found, PartsObjective)
    assert (found.surrogate, found.ratio.level) == (Clip(low=3e-4, high=0.1), "geometric")
    assert parse_config({"train": {"objective": found.model_dump(mode="json")}}).train.objective == found
    given = found.model_dump(mode="json", exclude_unset=True)
    assert given == {"kind": "gspo", "surrogate": {"high": 0.1}}
    assert parse_config({"train": {"objective": given}}).train.objective == found
    other = parse_config({"train": {"objective": {"kind": "gspo", "surrogate": {"kind": "kimi"}}}}).train.objective
    assert isinstance(other, PartsObjective)
    assert other.surrogate == Kimi()


@pytest.mark.parametrize("kind", PRESETS)
def test_recorded_objective_preset_is_read_unchanged(kind: str) -> None:
    found = parse_config({"train": {"objective": {"kind": kind}}, "environment": {"kind": "import", "path": "a:B"}})
    assert parse_config(json.loads(json.dumps(found.model_dump(mode="json")))) == found


def test_old_objective_keys_are_read() -> None:
    """Runs with old objective keys can be replayed, with the same advantages."""
    old = {
        "baseline": "group",
        "normalize": False,
        "negative_weight": 0.3,
        "aggregation": "sequence-mean",
        "objective": {"kind": "grpo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0},
    }
    assert parse_config({"train": old}).train.objective == PartsObjective(
        advantage=Advantage(scale="none", negative_weight=0.3),
        aggregation="sequence-mean",
        surrogate=Clip(low=0.1, high=0.3, dual=2.0),
    )
    plain = parse_config({"train": {**old, "baseline": "none", "normalize": True}}).train.objective
    assert plain.advantage == Advantage(baseline="none", scale="none")
    capped = {"objective": {"kind": "decoupled-ppo", "clip_low": 0.2, "clip_high": 0.28, "weight_cap": 3.0}}
    found = parse_config({"train": capped}).train.objective
    assert isinstance(found, PartsObjective)
    assert (found.correction.outside, found.correction.high) == ("clamp", 3.0)
    assert found.ratio.to == "proximal"
    own = parse_config({"train": {**old, "objective": {"kind": "import", "path": "a:b"}}}).train.objective
    assert own.aggregation == "sequence-mean"
    with pytest.raises(ConfigError, match=r"^train\.normalize = 'x': there is no such key"):
        parse_config({"train": {"normalize": "x"}})


def test_old_objective_key_sets_only_keys_that_are_unset() -> None:
    both = {"baseline": "none", "objective": {"advantage": {"negative_weight": 0.3}}}
    found = parse_config({"train": both}).train.objective.advantage
    assert found == Advantage(baseline="none", scale="none", negative_weight=0.3)


def test_key_of_another_surrogate_kind_is_named_in_the_error() -> None:
    tree = {"train": {"objective": {"kind": "topr", "surrogate": {"dual": 2.0}}}}
    with pytest.raises(ConfigError, match=r"^train\.objective\.surrogate\.dual = 2\.0: there is no such key here"):
        parse_config(tree)


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
def test_double_off_policy_correction_is_refused(objective: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"^train\.objective\.correction\.outside = .* correct samples twice; set ratio\.to"
    ):
        parse_config({"train": {"objective": objective}})
    parse_config({"train": {"objective": {**objective, "ratio": {"to": "proximal"}}}})


@pytest.mark.parametrize(
    ("kind", "correction", "words"),
    [
        ("grpo", {"high": 3.0}, r'high = 3\.0: .* outside = "none"; remove it, or set outside to "clamp" or "mask"'),
        ("tis", {"low": 0.5, "judge": "geometric"}, r"low = 0\.5: this key has no effect"),
        ("decoupled-ppo", {"weigh": False}, r'weigh = False: .* outside = "clamp"; .* set outside to "mask"'),
        ("decoupled-ppo", {"judge": "sequence"}, r"judge = 'sequence': this key has no effect"),
        ("mis", {"second_moment": 0.1}, r'second_moment = 0\.1: .* set outside to "second-moment"'),
        ("m2po", {"level": "geometric"}, r"level = 'geometric': this key has no effect"),
        ("geometric-mask", {"outside": "none", "low": 0.9}, r"low = 0\.9: this key has no effect"),
        (
            "grpo",
            {"outside": "mask", "weigh": False, "judge": "token", "level": "sequence", "high": 2.0, "low": 0.5}
            | {"second_moment": 0.04},
            r"level = 'sequence': this key has no effect, because the mask decides",
        ),
    ],
)
def test_correction_key_without_effect_is_refused(kind: str, correction: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.objective\.correction\.{words}"):
        parse_config({"train": {"objective": {"kind": kind, "correction": correction}}})


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"penalties": {"kl": "k1"}}, r"penalties\.kl = 'k1': this key has no effect without kl_weight"),
        (
            {"penalties": {"kl_to": "reference"}},
            r"penalties\.kl_to = 'reference': this key has no effect without kl_weight",
        ),
        (
            {"penalties": {"kl_weight": 0.1, "kl_gain": 0.2}},
            r"penalties\.kl_gain = 0\.2: this key has no effect without kl_target",
        ),
        (
            {"kind": "rloo", "ratio": {"level": "sequence"}},
            r"ratio\.level = 'sequence': this key has no effect while the surrogate has no ratio",
        ),
        ({"kind": "rloo", "ratio": {"to": "proximal"}}, r"ratio\.to = 'proximal': this key has no effect"),
        (
            {"kind": "rloo", "ratio": {"to": "proximal", "level": "sequence"}},
            r"ratio\.level = 'sequence': this key has no effect",
        ),
        (
            {"kind": "rloo", "ratio": {"to": "proximal"}, "correction": {"outside": "second-moment"}},
            r"ratio\.to = 'proximal': this key has no effect",
        ),
    ],
)
def test_penalty_or_ratio_key_without_effect_is_refused(objective: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.objective\.{words}"):
        parse_config({"train": {"objective": objective}})


@pytest.mark.parametrize("kl_to", ["behaviour", "reference"])
def test_kl_estimator_k1_in_the_loss_is_refused(kl_to: str) -> None:
    penalties = {"kl": "k1", "kl_to": kl_to, "kl_weight": 0.1}
    with pytest.raises(
        ConfigError, match=r"^train\.objective\.penalties\.kl = 'k1': the gradient of k1 .* choose \"k2\""
    ):
        parse_config({"train": {"objective": {"penalties": penalties}}})
    parse_config({"train": {"objective": {"penalties": {**penalties, "kl_weight": 0.0}}}})
    parse_config({"train": {"objective": {"penalties": {**penalties, "kl_to": "reference", "kl_in": "reward"}}}})


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-sum", "constant"])
@pytest.mark.parametrize("kind", ["grpo", "dppo"])
def test_sequence_ratio_in_a_token_loss_is_refused(kind: str, aggregation: str) -> None:
    objective = {"kind": kind, "ratio": {"level": "sequence"}, "aggregation": aggregation}
    with pytest.raises(ConfigError, match=r"^train\.objective\.ratio\.level = 'sequence': with aggregation = \"\w+"):
        parse_config({"train": {"objective": objective}})
    parse_config({"train": {"objective": {**objective, "aggregation": "sequence-mean"}}})


def test_recorded_config_that_is_invalid_today_can_be_read() -> None:
    """A recorded run can be replayed although a new run may not have its config."""
    parts = {
        "ratio": Ratio(level="sequence"),
        "correction": Correction(high=3.0),
        "penalties": Penalties(kl="k1", kl_weight=0.1),
    }
    kept = parse_config(with_every_part(**{name: part.model_dump() for name, part in parts.items()})).train.objective
    assert {name: getattr(kept, name) for name in parts} == parts


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"penalties": {"kl": "k1", "kl_weight": 0.1}}, r"penalties\.kl = 'k1': the gradient of k1 "),
        ({"ratio": {"level": "sequence"}}, r"ratio\.level = 'sequence': with aggregation = "),
    ],
)
def test_form_with_conflicting_objective_parts_is_refused(part: dict[str, object], words: str, tmp_path: Path) -> None:
    config = parse_config(with_every_part(**part) | {"store": {"uri": str(tmp_path)}})
    with pytest.raises(ConfigError, match=rf"^train\.objective\.{words}"):
        prepare(config, "new")
    assert not list(tmp_path.rglob("*.json"))


def test_sweep_of_a_resolved_recipe_refuses_invalid_values(tmp_path: Path) -> None:
    """`rollflow check --resolved` prints such recipes."""
    path = recipe(tmp_path, to_toml(with_every_part()))
    load_recipe(path, ["train.objective.penalties.kl=k1"])
    with pytest.raises(ConfigError, match=r"^train\.objective\.penalties\.kl = 'k1': the gradient of k1 "):
        load_recipe(path, ["train.objective.penalties.kl=k1", "train.objective.penalties.kl_weight=0.1"])


def with_every_part(**parts: object) -> dict[str, Any]:
    """Return a config tree that sets every part of the objective, like a tree that a run records or a form sends."""
    return {"train": {"objective": PartsObjective().model_dump(mode="json") | parts}}


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"surrogate": "clip", "clip_low": 0.1}, r"surrogate = 'clip': "),
        ({"kind": "tis", "correction": 3, "weight_cap": 5.0}, r"correction = 3: "),
        ({"surrogate": {"high": 1e39}}, r"surrogate\.high = 1e\+39 is greater than"),
        ({"penalties": {"kl_weight": 1e39}}, r"penalties\.kl_weight = 1e\+39 is greater than"),
    ],
)
def test_invalid_objective_part_or_number_is_refused(objective: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.objective\.{words}"):
        parse_config({"train": {"objective": objective}})


def test_kl_weight_of_zero_in_a_sweep_is_accepted() -> None:
    parse_config({"train": {"objective": {"penalties": {"kl_to": "reference", "kl_in": "reward", "kl_weight": 0.0}}}})
    parse_config(
        {"train": {"objective": {"kind": "rloo", "ratio": {"level": "sequence"}, "surrogate": {"positive": [0, 2]}}}}
    )
    parse_config(
        {"train": {"objective": {"kind": "mis", "ratio": {"to": "proximal"}}}}
    )  # `to` names the policy to which the correction's ratio is taken


@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "topr", "surrogate": {"kind": "policy-gradient", "negative": [1.0, 1.0]}},
        {"penalties": {"kl_to": "reference", "kl_weight": 0.0}},
    ],
)
def test_objective_is_unchanged_after_write_and_read(objective: dict[str, object]) -> None:
    taken = parse_config({"train": {"objective": objective}}).train.objective
    assert parse_config({"train": {"objective": taken.model_dump(mode="json")}}).train.objective == taken


def test_recorded_objective_key_without_effect_is_accepted() -> None:
    parse_config({"train": {"objective": {"kind": "geometric-mask", "correction": {"outside": "none"}}}})
    parse_config({"train": {"objective": {"correction": {"weigh": True, "low": 0.0}}}})
    kept = parse_config(with_every_part(correction={"high": 3.0})).train.objective
    assert kept.correction == Correction(high=3.0)  # type: ignore[union-attr]


def test_key_that_no_section_kind_has_is_refused(tmp_path: Path) -> None:
    path = recipe(tmp_path, ENGINE.replace("max_concurrent_requests", "max_requests"))
    with pytest.raises(
        ConfigError, match=r"engine\.max_requests = 7: .* did you mean engine\.max_concurrent_requests\?"
    ):
        load_recipe(path, ["engine.kind=timed"])


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"engine": {"kind": "sglang"}}, "engine.kind = 'sglang' is not one of ['vllm', 'transformers', 'timed']"),
        (
            {"prompts": [{"path": "x"}]},
            "prompts.0 = {'path': 'x'} has no kind;",
        ),
        ({"prompts": [{"kind": "csv"}]}, "prompts.0.kind = 'csv' is not one of ['reasoning-gym', 'jsonl', "),
        (
            {"train": {"objective": {"kind": "grpo", "clip_low": 3}}},
            "train.objective.surrogate.low = 3 is greater than the maximum of 1",
        ),
    ],
)
def test_error_names_a_key_without_its_section_kind(tree: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(tree)
    assert str(refused.value).startswith(words)


def test_printed_keys_include_every_section_kind() -> None:
    lines = describe_keys(RunConfig)
    for line in ('engine.kind = "timed"', 'prompts.kind = "jsonl"', 'train.objective.surrogate.kind = "kimi"'):
        assert any(one.startswith(f"{line}  # ") for one in lines)


def test_printed_key_has_default_and_allowed_values() -> None:
    lines = {line.partition(": ")[0] for line in describe_keys(RunConfig)}
    assert {
        "versions = 100  # whole number above 0",
        "async_ratio = 2.0  # number at least 0, at most 1e+09",
        'policy.dtype = "float32"  # "float32" or "bfloat16"',
        "policy.path = unset  # text",
        "engine.prefix_caching = true  # true or false",
        "train.betas = [0.9, 0.95]  # list",
    } <= lines


def test_section_without_kind_has_the_default_kind() -> None:
    tree = {
        "engine": {"max_concurrent_requests": 9},
        "reward": {"workers": 2},
        "train": {"objective": {"clip_low": 0.1}},
    }
    assert parse_config(tree) == parse_config(
        {
            "engine": {"kind": "vllm", "max_concurrent_requests": 9},
            "reward": {"kind": "exact", "workers": 2},
            "train": {"objective": {"kind": "grpo", "clip_low": 0.1}},
        }
    )


@pytest.mark.parametrize(
    ("prompts", "reward", "kind"),
    [
        ({"kind": "reasoning-gym"}, {}, "reasoning-gym"),
        ({"kind": "reasoning-gym"}, {"reward": {"workers": 2}}, "reasoning-gym"),
        ({"kind": "reasoning-gym"}, {"reward": {"kind": "exact"}}, "exact"),
        ({"kind": "sorting"}, {}, "exact"),
        ({"kind": "jsonl", "path": "x"}, {"reward": {"workers": 2}}, "exact"),
    ],
)
def test_default_verifier_depends_on_the_kind_of_prompts(
    prompts: dict[str, Any], reward: dict[str, Any], kind: str
) -> None:
    assert parse_config({"prompts": [prompts], **reward}).reward.kind == kind


@pytest.mark.parametrize("kind", ["sorting", "column-sums"])
def test_unsuitable_verifier_is_refused(kind: str) -> None:
    words = rf"reward\.kind = 'reasoning-gym': prompts of kind \"{kind}\" belong to no"
    with pytest.raises(ConfigError, match=words):
        parse_config({"prompts": [{"kind": kind}], "reward": {"kind": "reasoning-gym"}})


class Other(TrainBase):
    """Another kind of learner."""

    kind: Literal["other"] = "other"
    rank: int = 1


class Tree(Section):
    """A config with two kinds of learners."""

    train: Annotated[TorchTrain | Other, Field(discriminator="kind")] = TorchTrain()


def test_key_kind_selects_the_learner() -> None:
    assert Tree.model_validate({"train": {"threads": 2}}).train == TorchTrain(threads=2)
    assert Tree.model_validate({"train": {"kind": "other", "rank": 3}}).train == Other(rank=3)
    for wrong, words in (
        ({"kind": "third"}, "train.kind = 'third' is not one of ['torch', 'other']"),
        ({"kind": "other", "rank": "x"}, "train.rank = 'x' is not of type 'integer'"),
        ({"kind": "other", "sharded": True}, "train.sharded = True: there is no such key"),
    ):
        with pytest.raises(ValidationError) as refused:
            Tree.model_validate({"train": wrong})
        assert describe_error(refused.value.errors()[0], Tree).startswith(words)


def test_unknown_learner_kind_is_refused() -> None:
    assert main(["check", "flows/recipes/sorting.toml", "--set", "train.kind=torch"]) == 0
    assert main(["check", "flows/recipes/sorting.toml", "--set", "train.kind=jax"]) == 2
