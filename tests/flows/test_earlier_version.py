"""Tests that a run with `[policy.from_run]` begins with the exact weights of an earlier run's policy version, and never
reads the earlier run again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from rollflow.flows.commands.cli import main
from rollflow.flows.config import parse_config
from rollflow.flows.locations import context_of
from rollflow.flows.preflight import recheck
from rollflow.flows.prepare import prepare
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.log.entries import RunCreated, entry_path
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import tree_of
from rollflow.tasks.run.context import RunContext
from tests.support.forger import Forger
from tests.support.s3_server import s3_server, use
from tests.support.small_run import GROUPS, SIZE, SUMS, copy_run, prepare_small, train_small


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train 6 versions, some of which are stored as deltas, and of which version 1 has no weights."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        context = prepare_small(
            home, dtype="bfloat16", train={"learning_rate": 1e-5}, keep_last=2, keep_every=3, full_every=2
        )
        train_small(context)
        assert [number for number in range(7) if context.policies.find(number).deltas] == [1, 3, 5]
        yield context


def recipe(from_run: Mapping[str, object], **changes: object) -> RunConfig:
    return parse_config(
        {
            "policy": {"from_run": from_run},
            "versions": 2,
            "groups": GROUPS,
            "group_size": SIZE,
            "async_ratio": 1,
            "engine": {"kind": "transformers", "max_new_tokens": 8},
            "train": {"warmup_versions": 0, "learning_rate": 1e-3},
            "evaluation": {"prompts": 4},
            "prompts": [SUMS],
            **changes,
        }
    )


def weights_of(context: RunContext, version: int) -> bytes:
    [stored] = context.policies.find(version).weights
    return bytes(context.policies.read(stored))


def tensors_of(weights: bytes) -> dict[str, torch.Tensor]:
    """Read the tensors of a weight file as float32, so that files with different headers and data types can be
    compared.
    """
    return {name: tensor.float() for name, tensor in load(weights).items()}


def check_begins_with(context: RunContext, earlier: RunContext, version: int) -> None:
    """Check the copied weights, and what log entry 0 records about their origin."""
    assert context.store.get("policy/model.safetensors") == weights_of(earlier, version)
    source = context.created.source_version
    assert source is not None
    published = earlier.policies.find(version)
    assert (source.uri, source.run_id) == (earlier.store.uri, "small")
    assert (source.version, source.entry, source.weights) == (version, published.entry, published.weights)
    assert context.tokenizer.encode("Calculate 1 + 1.") == earlier.tokenizer.encode("Calculate 1 + 1.")


@pytest.mark.parametrize(("version", "begins"), [(5, 5), (6, 6), (None, 6), (0, 0)])
def test_run_begins_with_the_version_of_an_earlier_run(earlier: RunContext, version: int | None, begins: int) -> None:
    """A version is named by the run id or by the path of its run; some versions are stored as deltas."""
    for name, run in (("id", "small"), ("path", earlier.uri)):
        given = {"run": run} if version is None else {"run": run, "version": version}
        context = prepare(recipe(given), f"new-{name}-{version}")
        check_begins_with(context, earlier, begins)


def test_run_continues_after_the_earlier_run_is_deleted(earlier: RunContext, tmp_path: Path) -> None:
    """The new run is trained, checked and audited without the earlier run."""
    gone = copy_run(earlier, tmp_path / "runs" / "gone")
    first = tensors_of(weights_of(gone, 5))
    context = prepare(recipe({"run": gone.uri, "version": 5}), "orphan")
    train_small(context, 1)
    shutil.rmtree(gone.uri)
    again = RunContext(context.uri, context.cache)
    recheck(again.config, again)
    train_small(again)
    assert again.policies.newest() == 2
    began, ended = (tensors_of(weights_of(again, version)) for version in (0, 2))
    assert all(torch.equal(began[name], tensor) for name, tensor in first.items())
    assert not all(torch.equal(ended[name], tensor) for name, tensor in first.items())
    assert audit(again.store).clean


def test_log_shows_the_version_with_which_a_run_begins(earlier: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(recipe({"run": "small", "version": 3}), "shown")
    assert main(["log", "shown"]) == 0
    assert f"begins with version 3 of run small ({earlier.store.uri})" in capsys.readouterr().out


def test_run_without_an_earlier_run_records_no_source_version(earlier: RunContext) -> None:
    """The first log entry has the same fields as in earlier releases."""
    assert b'"source_version"' not in earlier.store.get(entry_path(0))


def test_audit_finds_a_copy_that_differs_from_its_source(earlier: RunContext) -> None:
    context = prepare(recipe({"run": "small", "version": 3}), "forged")
    train_small(context)
    assert audit(context.store).clean

    def exchange(body: RunCreated) -> RunCreated:
        assert body.source_version is not None
        other = tuple(earlier.policies.find(5).weights)
        return replace(body, source_version=replace(body.source_version, weights=other))

    Forger(context).creation(exchange)
    [found] = [one for one in audit(context.store).violations if "no copy" in one.what]
    assert "begins with version 3 of" in found.what


@pytest.mark.parametrize(
    ("from_run", "words"),
    [
        ({"run": "nowhere"}, "policy.from_run.run = 'nowhere': there is no such run in "),
        ({"run": "/no/such/run"}, "policy.from_run.run = '/no/such/run': there is no such run in /no/such;"),
        ({"run": "no run id"}, "policy.from_run.run = 'no run id': run id = 'no run id'"),
        (
            {"run": "small", "version": 9},
            "policy.from_run.version = 9: version 9 is not published; run 'small' has versions 0 to 6; choose",
        ),
        (
            {"run": "small", "version": 1},
            "policy.from_run.version = 1: version 1: the weights of this version were deleted; run 'small' still has",
        ),
        ({"run": "unborn"}, "policy.from_run.run = 'unborn': run 'unborn' has no version yet; wait until"),
    ],
)
def test_missing_earlier_version_gets_a_one_sentence_error(
    earlier: RunContext, from_run: Mapping[str, object], words: str, tmp_path: Path
) -> None:
    if from_run["run"] == "unborn":
        prepare_small(tmp_path, "unborn")
    with pytest.raises(ConfigError) as refused:
        prepare(recipe(from_run), "refused")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not context_of(str(Path(earlier.uri).parent.parent), "refused").store.exists(entry_path(0))


def test_run_starts_if_the_copies_cannot_be_deleted_yet(earlier: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a folder is not empty while a file of it is mapped."""
    remove = os.rmdir

    def refuse(path: Any, **keys: Any) -> None:
        if "fetched" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path, **keys)

    monkeypatch.setattr(os, "rmdir", refuse)
    check_begins_with(prepare(recipe({"run": "small", "version": 6}), "mapped"), earlier, 6)


def test_damaged_weights_are_not_copied(earlier: RunContext, tmp_path: Path) -> None:
    damaged = copy_run(earlier, tmp_path / "runs" / "damaged")
    [stored] = damaged.policies.find(6).stored_weights
    data = damaged.store.get(stored.path)
    damaged.store.put(stored.path, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt):
        prepare(recipe({"run": damaged.uri, "version": 6}), "from-damaged")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"kind": "transformers", "max_new_tokens": 128}}, "the policy's context has only 128 tokens"),
        ({"prompts": [{**SUMS, "chat": True}]}, "no chat template"),
    ],
)
def test_earlier_version_that_does_not_fit_the_recipe_is_refused(
    earlier: RunContext, changes: Mapping[str, object], words: str
) -> None:
    """The policy of the earlier run is checked like a policy folder."""
    with pytest.raises(ConfigError, match=words):
        prepare(recipe({"run": "small"}, **changes), "unfit")


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "path": st.just("/x"),
            "cold_start": st.just({}),
            "from_run": st.fixed_dictionaries(
                {"run": st.text(max_size=9) | st.sampled_from(["small", "../runs/small", "s3://bucket/runs/small"])},
                optional={"version": st.integers(-1, 2**70)},
            ),
        },
    )
)
def test_policy_is_chosen_by_exactly_one_valid_key(drawn: Mapping[str, Any]) -> None:
    """A recipe with any policy is accepted and recorded unchanged, or refused with the key."""
    from_run = drawn.get("from_run", {"run": "small"})
    if len(drawn) != 1 or from_run["run"] == "" or from_run.get("version", 0) < 0:
        with pytest.raises(ConfigError, match=r"policy\.\w+"):
            parse_config({"policy": drawn})
        return
    config = parse_config({"policy": drawn})
    assert parse_config(json.loads(json.dumps(tree_of(config)))) == config
    assert config.model_dump(exclude_unset=True)["policy"] == drawn


@pytest.mark.long
def test_run_on_s3_begins_with_a_version_on_s3(
    earlier: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas are read from S3; no copy of the weights is left on this machine."""
    with s3_server("bucket") as endpoint:
        use(endpoint, monkeypatch)
        remote = RunContext("s3://bucket/runs/small", tmp_path / "cache")
        for path in earlier.store.list():
            remote.store.put(path, earlier.store.get(path))
        monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
        new = recipe({"run": "small", "version": 5}, store={"uri": "s3://bucket"})
        check_begins_with(prepare(new, "remote"), remote, 5)
        local = recipe({"run": "s3://bucket/runs/small", "version": 6})
        check_begins_with(prepare(local, "local"), remote, 6)
    assert not list((tmp_path / "home").rglob("fetched/*/*/*.safetensors"))
