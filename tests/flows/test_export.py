"""Tests that `rollflow export` writes a complete folder or nothing, reads from any store, and refuses a policy with an
ambiguous tokenizer.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rollflow.flows.commands.cli import main
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.storage.objects.disk import raise_store_failed
from rollflow.storage.objects.local import LocalStore
from rollflow.tasks.engines.config import TransformersEngineConfig
from rollflow.tasks.policies.config import ColdStart, PolicyConfig
from rollflow.tasks.policies.tokenizer import PolicyTokenizer, find_other_reading
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.s3_server import s3_server, use
from tests.support.small_run import make_policy, prepare_small, train_small

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train 6 versions, of which version 1 has no weights."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        context = prepare_small(home, keep_last=2, keep_every=3)
        train_small(context)
        yield context


def command(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in ("export", *arguments)]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return captured.out if code == 0 else captured.err


def test_export_writes_all_files_of_the_policy_folder(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new" / "below"):
        out = command(capsys, "small", 3, folder, code=0)
        assert "vllm serve" in out
        assert {file.name for file in folder.iterdir()} == FILES
        assert list(folder.parent.glob(".*")) == []
    [weights] = trained.policies.find(3).weights
    assert (tmp_path / "empty/model.safetensors").read_bytes() == trained.store.get(weights.path)


def test_impossible_export_gets_a_one_sentence_error(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An export that is impossible ends with exit code 2 and writes nothing."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    new = tmp_path / "new"
    for arguments, words in (
        (("nowhere", 1, new), "there is no such run; check the run id"),
        (("small", 9, new), "version 9 is not published; run 'small' has versions 0 to 6"),
        (
            ("small", 1, new),
            "version 1: the weights of this version were deleted; run 'small' still has the weights of versions 0, 2, ",
        ),
        (("small", 3, tmp_path / "full"), "exists and is not empty; name a new folder"),
        (("small", 3, tmp_path / "file"), "cannot be written (Not a directory)"),
        (("small", 3, tmp_path / "file/below"), "cannot be written (File exists)"),
        (("small", 3, "/proc/new"), "cannot be written"),
    ):
        sentence = command(capsys, *arguments, code=2)
        assert words in sentence
        assert sentence.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["mine"]


def test_export_works_without_the_prompt_files(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt file may be lost, or packages upgraded: the weights are unchanged."""
    monkeypatch.setattr("rollflow.tasks.run.prompt_pins.package_version", lambda _: "99.0")
    with pytest.raises(ConfigError, match="the run began with reasoning-gym"):
        RunContext(trained.uri, trained.cache).prompts()
    command(capsys, "small", 3, tmp_path / "new", code=0)
    assert {file.name for file in (tmp_path / "new").iterdir()} == FILES


def test_damaged_weights_are_not_exported(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    [weights] = trained.policies.find(5).weights
    before = trained.store.get(weights.path)
    trained.store.put(weights.path, before[:-1] + bytes([before[-1] ^ 1]))
    try:
        assert "does not have the content that its log entry names" in command(
            capsys, "small", 5, tmp_path / "new", code=1
        )
    finally:
        trained.store.put(weights.path, before)
    assert os.listdir(tmp_path) == []


def test_full_disk_leaves_no_partial_file(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        with raise_store_failed(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalStore, "fetch", full)
    assert "new' cannot be written (No space left on device)" in command(capsys, "small", 3, tmp_path / "new", code=2)
    assert os.listdir(tmp_path) == []


def test_concurrent_export_does_not_overwrite_the_folder(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exports write to one folder. When the second export ends, the folder exists already."""

    def meanwhile(*_: object) -> None:
        (tmp_path / "new").mkdir()
        (tmp_path / "new/theirs").write_text("theirs")

    monkeypatch.setattr("rollflow.flows.export._check_tokenizer_agrees", meanwhile)
    assert "cannot be written (Directory not empty)" in command(capsys, "small", 3, tmp_path / "new", code=2)
    assert os.listdir(tmp_path) == ["new"]
    assert os.listdir(tmp_path / "new") == ["theirs"]


@pytest.mark.long
def test_run_on_s3_is_exported(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server("bucket") as endpoint:
        use(endpoint, monkeypatch)
        remote = RunContext("s3://bucket/runs/small", tmp_path / "cache")
        for path in trained.store.list():
            remote.store.put(path, trained.store.get(path))
        command(capsys, "small", 6, tmp_path / "new", "--store", "s3://bucket", code=0)
        assert "were deleted" in command(capsys, "small", 1, tmp_path / "other", "--store", "s3://bucket", code=2)
    assert {file.name for file in (tmp_path / "new").iterdir()} == FILES


def test_export_and_evaluation_work_without_prompt_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained policy is in storage; a prompt file that the run did not store may have been moved or changed."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    (file := tmp_path / "mine.jsonl").write_text(
        "".join(f'{{"question": "{i}+1", "answer": {i + 1}}}\n' for i in range(90))
    )
    prompts = [{"kind": "jsonl", "path": str(file), "held_out": 0.1}]
    context = prepare_small(tmp_path, versions=3, prompts=prompts, keep_prompts_bytes=0)
    train_small(context)
    file.unlink()
    command(capsys, "small", 3, tmp_path / "new", code=0)
    assert {one.name for one in (tmp_path / "new").iterdir()} == FILES
    [discarded] = context.batches.read_commit(context.policies.find(3).batch_entry or 0).discards
    assert main(["inspect", "small", f"{discarded.key.prompt}.{discarded.key.attempt}"]) == 0
    shown = capsys.readouterr().out
    assert "discarded" in shown
    assert "cannot be read" in shown


def as_qwen2(folder: Path) -> None:
    """Give the policy a model type for which transformers adds its own pre-tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def prepared(folder: Path) -> RunContext:
    config = RunConfig(policy=PolicyConfig(path=str(folder)), engine=TransformersEngineConfig())
    return prepare(config, uuid.uuid4().hex)


def test_policy_with_ambiguous_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixes that the error names make the policy acceptable."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    make_policy(folder := tmp_path / "policy")
    prepared(folder)
    as_qwen2(folder)
    with pytest.raises(
        ConfigError, match=r"AutoTokenizer encodes .* as the tokens \[.*\], and tokenizer.json as \[.*save_pretrained"
    ):
        prepared(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    # Qwen2's tokenizer class adds this token
    with pytest.raises(ConfigError, match=r"'<\|endoftext\|>' .* resize the model's embeddings"):
        prepared(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)))
    model.save_pretrained(folder)
    context = prepared(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert context.tokenizer.encode("Calculate 1 + 1 + 1.") == theirs.encode("Calculate 1 + 1 + 1.")


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    """A tokenizer that was saved after a truncating or padding call records that setting in its file; other tools
    ignore the setting.
    """
    from transformers import AutoTokenizer

    make_policy(folder := tmp_path / "policy")
    text = "Calculate 1 + 1 + 1. " * 30
    expected = AutoTokenizer.from_pretrained(folder).encode(text)
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(max_length=20)
    fast.enable_padding(length=64)
    fast.save(str(folder / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(folder).encode(text) == expected
    assert PolicyTokenizer(folder).encode(text) == expected
    assert find_other_reading(folder, [text]) is None


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer_config.json", {"pad_token": "<pad>"}, "another vocabulary"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "as the tokens"),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, None),
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True}, None),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["no.Such", "no.Such"]}}, None),
    ],
)
def test_export_error_names_the_ambiguous_tokenizer_setting(
    file: str, change: dict[str, object], words: str | None, tmp_path: Path
) -> None:
    make_policy(folder := tmp_path / "policy")
    assert find_other_reading(folder) is None
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    assert (words or "None") in str(find_other_reading(folder))


def test_ambiguous_tokenizer_blocks_only_the_export(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run itself can continue, because the two tokenizers may have agreed with older libraries."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    make_policy(tmp_path / "policy")
    as_qwen2(tmp_path / "policy")
    with monkeypatch.context() as before:
        before.setattr("rollflow.flows.preflight.find_other_reading", lambda *_: None)
        context = prepare_small(tmp_path)
    train_small(context, 2)
    train_small(context, 4)
    assert context.policies.newest() == 4
    sentence = command(capsys, "small", 4, tmp_path / "new", code=2)
    assert "run 'small' cannot be exported for other tools" in sentence
    assert "AutoTokenizer encodes" in sentence
    assert not (tmp_path / "new").exists()


def test_cold_start_policy_names_its_end_token_in_both_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    policy = PolicyConfig(cold_start=ColdStart(hidden_size=32, heads=1), dtype="bfloat16")
    folder = prepare(RunConfig(policy=policy), "cold").policy_folder
    config, generation = (json.loads((folder / f).read_text()) for f in ("config.json", "generation_config.json"))
    assert config["torch_dtype"] == "bfloat16"
    assert generation == {"eos_token_id": 1, "pad_token_id": 0}
    assert {name: config[name] for name in generation} == generation
