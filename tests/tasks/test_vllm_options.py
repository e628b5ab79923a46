"""The options of vLLM in a recipe: which are passed on and which are refused, and the limit on prompts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollflow.flows.config import parse_config
from rollflow.flows.preflight import preflight
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.engines.vllm.arguments import build_arguments
from rollflow.tasks.engines.vllm.passed_arguments import REASONS, REFUSED, REPLACED, check_names, read_names
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.cold_start.demonstrated_episodes import DemonstratedEpisodes
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import check_change
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.run.prompt_check import fit_files, read_files

NAMES = read_names()
ALLOWED = sorted({name for name in NAMES if not name.startswith("_")} - REFUSED.keys())
# whatever TOML can say
VALUES = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text("abc", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner),
    max_leaves=4,
)
GIB = 1 << 30
FOUR_KB_A_TOKEN = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, ColdStart())


def make_folder(folder: Path, cold: ColdStart, **changes: object) -> Path:
    for name, data in build_cold_folder(cold, ["What is 1 + 1?"] * 10).items():
        (folder / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def arguments_of(folder: Path, *, gpu: bool = False, seeded: bool = False, **keys: Any) -> dict[str, Any]:
    config = VllmEngineConfig.model_validate(keys)
    return build_arguments(config, folder, dtype="float32", seeded=seeded, told_as="run", gpu=gpu)


def test_refused_arguments_are_those_of_the_installed_vllm() -> None:
    assert sorted(REFUSED.keys() - set(NAMES)) == []
    assert len(NAMES) == 257, "decide for each new argument of vLLM whether it is passed on"
    named = [name for names in REASONS.values() for name in names.split()]
    assert len({*named, *REPLACED}) == len(named) + len(REPLACED) == len(REFUSED)
    assert {"max_num_batched_tokens", "async_scheduling", "compilation_config", "moe_backend"} <= set(ALLOWED)


@pytest.mark.parametrize("gpu", [True, False])
def test_every_argument_that_rollflow_sets_is_refused(folder: Path, gpu: bool) -> None:
    set_keys = {"max_model_len": 100, "enforce_eager": True, "attention_backend": "A", "speculation": "suffix"}
    set_keys |= {"quantization": "fp8_per_channel"}
    sizes = [{"gpu_memory_utilization": 0.5}, {"kv_cache_bytes": 4}]
    for keys, seeded in itertools.product(sizes, [True, False]):
        found = arguments_of(folder, gpu=gpu, seeded=seeded, **set_keys, **keys)
        assert {*keys, "max_model_len"} - {"kv_cache_bytes"} <= found.keys()
        assert sorted(found.keys() - REFUSED.keys()) == []


@given(st.sampled_from(sorted(REFUSED)), VALUES)
def test_refused_argument_is_named_with_its_reason(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        VllmEngineConfig.model_validate({"vllm": {"max_num_batched_tokens": 4096, name: value}})
    [error] = refused.value.errors()
    assert error["msg"].startswith(f"engine.vllm.{name} = {value!r}: ")
    assert error["msg"].endswith(f"set {REPLACED[name]} instead" if name in REPLACED else "; remove the argument")


@given(st.dictionaries(st.sampled_from(ALLOWED), VALUES, max_size=3))
def test_other_arguments_are_passed_on_unchanged(given: dict[str, Any]) -> None:
    check_names(given, NAMES)
    config = parse_config({"engine": {"max_new_tokens": 8, "vllm": given}})
    assert isinstance(config.engine, VllmEngineConfig)
    assert RunConfig.model_validate_json(config.model_dump_json()).engine == config.engine
    made = build_arguments(config.engine, Path(), dtype="float32", seeded=False, told_as="", gpu=True)
    assert {name: made[name] for name in given} == given


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("max_num_batched_token", "did you mean max_num_batched_tokens?"),
        ("max-num-batched-tokens", "did you mean max_num_batched_tokens?"),
        ("asynch_scheduling", "did you mean async_scheduling?"),
        ("max_model_length", "did you mean engine.max_model_len?"),
        ("max_tokens", "remove it"),
        ("_api_process_count", "remove it"),
        ("zzz", "remove it"),
    ],
)
def test_unknown_argument_is_refused_with_the_nearest_name(name: str, cure: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_names({name: 64}, NAMES)
    assert str(refused.value) == f"engine.vllm.{name} = 64: the installed vLLM has no such argument; {cure}"


@pytest.mark.parametrize(
    ("keys", "gpu", "expected"),
    [
        ({}, True, {"enforce_eager": False}),
        ({}, False, {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}),
        ({"enforce_eager": True}, True, {"enforce_eager": True}),
        ({"enforce_eager": False}, False, {"enforce_eager": False, "kv_cache_memory_bytes": 1 << 28}),
        ({"attention_backend": "FLASHINFER"}, True, {"enforce_eager": False, "attention_backend": "FLASHINFER"}),
        ({"gpu_memory_utilization": 0.5}, True, {"enforce_eager": False, "gpu_memory_utilization": 0.5}),
        ({"max_model_len": 100}, True, {"enforce_eager": False, "max_model_len": 100}),
        ({"quantization": "fp8_per_channel"}, True, {"enforce_eager": False, "quantization": "fp8_per_channel"}),
    ],
)
def test_option_becomes_an_argument_of_vllm(
    folder: Path, keys: dict[str, Any], gpu: bool, expected: dict[str, Any]
) -> None:
    """An option that is not set is left out, so that vLLM's default holds."""
    optional = {"enforce_eager", "attention_backend", "gpu_memory_utilization", "max_model_len"}
    optional |= {"kv_cache_memory_bytes", "quantization"}
    made = arguments_of(folder, gpu=gpu, **keys)
    assert {name: made[name] for name in optional if name in made} == expected


def test_kv_cache_on_a_cpu_has_room_for_the_longest_request(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, ColdStart(), max_position_embeddings=2**18, **FOUR_KB_A_TOKEN)
    assert arguments_of(folder)["kv_cache_memory_bytes"] == (2**18 + 32) * 4096
    assert arguments_of(folder, max_model_len=2**17)["kv_cache_memory_bytes"] == (2**17 + 32) * 4096
    assert arguments_of(folder, max_model_len=100)["kv_cache_memory_bytes"] == 1 << 28


def config_of(longest: int | None, **keys: Any) -> RunConfig:
    engine = {"max_new_tokens": 8, "max_model_len": longest}
    return parse_config({"policy": {"cold_start": {"context": 128}}, "engine": engine, **keys})


def test_prompt_and_response_fit_into_the_longest_request(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer(make_folder(tmp_path, ColdStart(context=128)))
    length = open_prompts(config_of(None), tokenizer, read_file).prompt(0).input.length
    assert open_prompts(config_of(length + 8), tokenizer, read_file).prompt(0).input.length == length
    with pytest.raises(ConfigError, match=f"a prompt has {length} tokens, and the context leaves room for only"):
        open_prompts(config_of(length + 7), tokenizer, read_file).prompt(0)


def test_prompt_file_rows_beyond_the_longest_request_are_dropped(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer(make_folder(tmp_path, ColdStart(context=128)))
    rows = [{"question": "1" * length, "answer": "2"} for length in (5, 40, 90)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "too_long": "drop"}
    kept = []
    for longest in (None, 70, 20):
        config = config_of(longest, prompts=[source], reward={"kind": "exact"})
        _, notes = fit_files(config, read_files(config, read_file), tokenizer, read_file, lambda _: None)
        kept.append(notes)
    assert kept[0] == []
    assert ["1 of 3" in str(kept[1]), "2 of 3" in str(kept[2])] == [True, True]


def test_demonstrated_episodes_fit_into_the_longest_request(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer(make_folder(tmp_path, ColdStart(context=128)))
    assert DemonstratedEpisodes(config_of(None), tokenizer)._context == 128
    assert DemonstratedEpisodes(config_of(60), tokenizer)._context == 60


def test_probe_fits_into_the_longest_request() -> None:
    assert len(preflight(config_of(None), ask=False).probe) == 32
    assert len(preflight(config_of(24), ask=False).probe) == 23  # vLLM samples a token after the probe


def test_longest_request_of_a_run_cannot_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    context = prepare(config_of(100), "longest")
    with pytest.raises(ConfigError, match=r"^engine.max_model_len = 101: the key cannot change, because the run's"):
        check_change(context, config_of(101))


@pytest.mark.parametrize("longest", [None, 100, 10**6])
def test_context_is_the_smaller_of_policy_and_engine(longest: int | None) -> None:
    assert VllmEngineConfig(max_model_len=longest).limit_context(256) == min(longest or 256, 256)
    assert TransformersEngineConfig().limit_context(256) == 256


@pytest.mark.parametrize(("keys", "tolerance"), [({}, 1.0), ({"probe_tolerance": 0.5}, 0.5)])
def test_quantized_engine_has_its_own_probe_tolerance(keys: dict[str, Any], tolerance: float) -> None:
    def tolerance_of(**engine: Any) -> float:
        return parse_config({"policy": {"cold_start": {}, "dtype": "bfloat16"}, "engine": engine}).probe_tolerance

    assert tolerance_of(**keys) == tolerance
    assert tolerance_of(quantization="fp8_per_channel", **keys) == keys.get("probe_tolerance", 2.0)
