"""Tests policy folders with random faults: each folder is refused in one sentence, or trained exactly as it is.

An accepted folder gives a version 0 with the folder's own tensors, and an engine whose log-probs equal the learner's.
There is no third outcome: neither another exception nor an unreported difference.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.preflight import Preflight, preflight
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.fixed_shape import FixedShapeSampler
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.policies import tokenizer
from rollflow.tasks.policies.stop import stop_tokens
from tests.support.counts import examples
from tests.support.policy_folders import CHAT, change_json, change_tensors, make_folder, recipe_of
from tests.support.refused import refused

KINDS = ("llama", "qwen3", "gemma2")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NEAR = 1e-4  # largest difference of log-probs between engine and learner, for weights far larger than trained ones
DRAWN = {"deadline": None, "suppress_health_check": list(HealthCheck)}
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Path]]:
    """Build a valid folder of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(tokenizer, "PIECES", tokenizer.PIECES[:5])  # other tests use all of them
        made = tmp_path_factory.mktemp("folders")
        yield {kind: make_folder(made / kind, kind, tokenizer={"template": CHAT}) for kind in KINDS}


# --- faults -------------------------------------------------------------------------------------------------


def drop(name: str) -> Change:
    return lambda folder: change_tensors(folder, lambda w: {k: v for k, v in w.items() if k != name})


def rename(name: str, new: str) -> Change:
    return lambda folder: change_tensors(folder, lambda w: {new if k == name else k: v for k, v in w.items()})


def copy(name: str, new: str) -> Change:
    return lambda folder: change_tensors(folder, lambda w: {**w, new: w[name].clone()})


def reshape(name: str, how: str) -> Change:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "cut": lambda t: t[1:].contiguous(),
        "flat": lambda t: t.flatten(),
        "row": lambda t: t[None].contiguous(),
        "turned": lambda t: t.t().contiguous() if t.ndim == 2 else t,
        "empty": lambda t: t[:0].contiguous(),
    }
    return lambda folder: change_tensors(folder, lambda w: {**w, name: ways[how](w[name])})


def poison(name: str, value: float, place: int) -> Change:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = tensors[name].flatten()
        flat[place % len(flat)] = value
        return {**tensors, name: flat.view(tensors[name].shape)}

    return lambda folder: change_tensors(folder, change)


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda folder: change_tensors(folder, lambda w: {**w, name: w[name].to(dtype)})


def cut(size: int) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return change


def names_of(folder: Path) -> list[str]:
    return sorted(load_file(folder / "model.safetensors"))


def tensor_faults(folder: Path) -> st.SearchStrategy[Change]:
    name = st.sampled_from(names_of(folder))
    new = st.sampled_from(
        ["lm_head.weight", "module.x.weight", "model.norm.weight", "model.layers.7.x", "score.weight"]
    )
    bad = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, 0.0])
    types = st.sampled_from([torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn])
    return st.one_of(
        st.builds(drop, name),
        st.builds(rename, name, new),
        st.builds(copy, name, new),
        st.builds(reshape, name, st.sampled_from(["cut", "flat", "row", "turned", "empty"])),
        st.builds(poison, name, bad, st.integers(0, 10**6)),
        st.builds(cast, name, types),
        st.builds(cut, st.integers(0, 3000)),
    )


VALUES = st.sampled_from(
    [None, ..., 0, -1, 1, 2, 3, 32, 33, 64, 0.5, -0.5, 1e-30, 1e30, "x", "", [], {}, [1], True, False]
)


def config_faults(folder: Path) -> st.SearchStrategy[Change]:
    keys = sorted(json.loads((folder / "config.json").read_text()))
    more = ["attn_logit_softcapping", "sliding_window", "rope_scaling", "quantization_config", "layer_types"]

    def change(key: str, value: object) -> Change:
        return lambda folder: change_json(folder / "config.json", **{key: value})

    return st.builds(change, st.sampled_from([*keys, *more]), VALUES)


TEMPLATES = [
    "",
    "{% for",
    CHAT,
    "<|start|>" + CHAT,
    CHAT + "<|end|>",
    "{{ messages[0]['content'] }}",
    "{{ messages[0]['content'] + 1 }}",
    "{{ raise_exception('no') }}",
    CHAT.replace("m['content']", "m['content'] | upper"),
    CHAT.replace("in messages", "in messages if m['role'] != 'system'"),
    "{{ strftime_now('%H:%M:%S.%f') }}" + CHAT,
    "{{ strftime_now(3) }}" + CHAT,
    CHAT.replace("<|over|>", ""),
]


def tokenizer_faults(folder: Path) -> st.SearchStrategy[Change]:
    tree = json.loads((folder / "tokenizer.json").read_text())
    described = sorted(json.loads((folder / "tokenizer_config.json").read_text()))

    def change(file: str, key: str, value: object) -> Change:
        return lambda folder: change_json(folder / file, **{key: value})

    def template(text: str) -> Change:
        return lambda folder: (folder / "chat_template.jinja").write_text(text) and None

    def model(key: str, value: object) -> Change:
        def write(folder: Path) -> None:
            found = json.loads((folder / "tokenizer.json").read_text())
            found["model"][key] = value
            (folder / "tokenizer.json").write_text(json.dumps(found))

        return write

    def token(id: int, content: str) -> Change:
        added = {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return change("tokenizer.json", "added_tokens", [*tree["added_tokens"], {"id": id, "special": True, **added}])

    ends = st.sampled_from([[], [1], [1, 4], 0, -1, 10**6, "x", None, [None], 1.5, True])
    return st.one_of(
        st.builds(change, st.just("tokenizer.json"), st.sampled_from(sorted(tree)), VALUES),
        st.builds(change, st.just("tokenizer_config.json"), st.sampled_from([*described, "bos_token"]), VALUES),
        st.builds(change, st.just("generation_config.json"), st.just("eos_token_id"), ends),
        st.builds(model, st.sampled_from(sorted(tree["model"])), VALUES),
        st.builds(token, st.sampled_from([0, 279, 280, 281, 5000]), st.sampled_from(["new", "<|end|>", " ", "7"])),
        st.builds(template, st.sampled_from(TEMPLATES)),
    )


# --- the outcome of the faults ------------------------------------------------------------------------------


def checked(folder: Path, **prompts: object) -> Preflight | None:
    """Return what a run starts with; None if the folder is refused, in one sentence."""
    try:
        return preflight(recipe_of(folder, **prompts), ask=False)
    except ConfigError as error:
        said = str(error)
        assert len(said.splitlines()) == 1, said
        assert ": " in said, said
        assert "; " in said or " with " in said, said
        return None


def trains_what_it_is(found: Preflight, folder: Path, stored: Path) -> None:
    """Check that version 0 equals the folder tensor by tensor, and that engine and learner give the same log-probs."""
    stored.mkdir()
    for name, data in found.files.items():
        (stored / name).write_bytes(data)
    for name in found.weights:
        shutil.copy(folder / name, stored)
    learner = TorchLearner(
        load_model(stored, "float32", trained=True), TorchTrain(), temperature=1.0, versions=1, longest=8, seed=0
    )
    version = stored / "version"
    version.mkdir()
    for name, data in learner.weights().items():
        (version / Path(name).name).write_bytes(data if isinstance(data, bytes) else b"".join(data))
    given, first = load_file(folder / "model.safetensors"), {}
    for file in version.glob("*.safetensors"):
        first |= load_file(file)
    for name, tensor in given.items():  # version 0 has one of two tied tensors, whichever the folder has
        other = first.get(name, first.get(EMBEDDING))
        assert other is not None, name
        assert torch.equal(other, tensor.float()), name
    assert first.keys() <= {*given, *([EMBEDDING] if HEAD in given else [])}
    sampler = FixedShapeSampler(stored, torch.float32, 4, stop_tokens(stored))
    sampler.load(version)
    tokens = list(found.probe)
    assert sampler.logprobs(tokens) == pytest.approx(learner.logprobs(tokens), abs=NEAR)


def try_folder(kind: str, folders: Mapping[str, Path], data: st.DataObject, faults: Any, place: Path) -> None:
    """Draw one or two faults, put them into a copy of the folder, and check the outcome."""
    folder = place / "policy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folders[kind], folder)
    for change in data.draw(st.lists(faults(folders[kind]), min_size=1, max_size=2)):
        try:
            change(folder)
        except Exception:  # noqa: BLE001 - after the first fault, the second may find nothing to change
            event("the first fault left nothing for a second")
    prompts = data.draw(st.sampled_from([{}, {"chat": True}, {"chat": True, "system": "Be kind."}]))
    found = checked(folder, **prompts)
    event("refused" if found is None else "accepted")
    if found is not None:
        trains_what_it_is(found, folder, place / "stored")


@pytest.mark.many
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("faults", [tensor_faults, config_faults, tokenizer_faults], ids=lambda one: one.__name__)
def test_random_policy_folder_fault_is_refused_or_harmless(
    kind: str, faults: Any, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    @settings(max_examples=examples(120), **DRAWN)
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        try_folder(kind, folders, data, faults, tmp_path / "case")

    drawn()


@pytest.mark.parametrize("kind", KINDS)
def test_valid_policy_folder_is_trained_unchanged(kind: str, folders: Mapping[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[kind], tmp_path / "policy")
    found = checked(tmp_path / "policy", chat=True, system="Be kind.")
    assert found is not None
    trains_what_it_is(found, tmp_path / "policy", tmp_path / "stored")


def test_tied_embedding_may_be_stored_under_the_lm_heads_name(folders: Mapping[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "policy")
    rename(EMBEDDING, HEAD)(tmp_path / "policy")
    found = checked(tmp_path / "policy")
    assert found is not None
    trains_what_it_is(found, tmp_path / "policy", tmp_path / "stored")


def test_negative_initializer_range_is_accepted(folders: Mapping[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["gemma2"], tmp_path / "policy")
    change_json(tmp_path / "policy/config.json", initializer_range=-0.5)
    found = checked(tmp_path / "policy")
    assert found is not None
    trains_what_it_is(found, tmp_path / "policy", tmp_path / "stored")


FAULTS: dict[str, Change] = {
    "missing": drop("model.norm.weight"),
    "template": lambda folder: (folder / "chat_template.jinja").write_text("{% for") and None,
    "config": lambda folder: change_json(folder / "config.json", num_attention_heads=3),
    "ends": lambda folder: change_json(folder / "generation_config.json", eos_token_id="x"),
    "longest": lambda folder: change_json(folder / "tokenizer_config.json", model_max_length="x"),
    "window": lambda folder: change_json(folder / "config.json", sliding_window=1e30),
}


def recipe_in(folder: Path) -> Path:
    recipe = folder / "recipe.toml"
    tree = recipe_of(folder, chat=True).model_dump(mode="json", exclude_unset=True)
    recipe.write_text(to_toml(tree))
    return recipe


@pytest.mark.parametrize("fault", FAULTS)
def test_check_and_run_refuse_a_recipe_with_equal_errors(
    fault: str, folders: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(folders["llama"], folder)
    FAULTS[fault](folder)
    recipe = str(recipe_in(folder))
    assert refused(capsys, "check", recipe, "--offline") == refused(capsys, "run", recipe)


@pytest.mark.soak
@pytest.mark.parametrize("command", ["check", "run"])
def test_check_and_run_end_with_exit_code_2_for_a_bad_folder(
    command: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    for fault, change in FAULTS.items():
        folder = tmp_path / fault
        shutil.copytree(folders["llama"], folder)
        change(folder)
        line = [sys.executable, "-m", "rollflow.flows.commands.cli", command, str(recipe_in(folder))]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.startswith("rollflow: ")
        assert len(ended.stderr.strip().splitlines()) == 1
