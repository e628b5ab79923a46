"""Tests that a change of any config key is recorded and applies to the resumed run, or is refused in one sentence.

Keys and values are drawn from the config's own schema, so a key that is added later is tested, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.resume import record_change
from rollflow.flows.config import override_config
from rollflow.flows.config_keys import key_values
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.configs import diff_trees
from rollflow.storage.log.entries import ConfigChanged
from rollflow.storage.objects import open_store
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import check_change, tree_of
from rollflow.tasks.run.context import RunContext
from tests.support.counts import examples
from tests.support.log_runs import of_kind
from tests.support.refused import refused
from tests.support.small_run import prepare_small, train_small

KEYS = sorted({str(one["key"]) for one in key_values()})
VALUES = [
    "0",
    "1",
    "2",
    "3",
    "0.5",
    "1.5",
    "true",
    "false",
    "started",
    "policy",
    "linear",
    "prefix",
    "drop",
    "deepspeed",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Make a run with two trained versions, and with a batch that waits to be trained."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.delenv("PREFECT_API_URL", raising=False)
        context = prepare_small(home, versions=4)
        train_small(context, until=2)
        yield context


def verdict(context: RunContext, override: str) -> tuple[RunConfig | None, str]:
    """Return the config that the override makes, and why the run may not change to it; "" if it may."""
    try:
        after = override_config(tree_of(context.config), [override])
    except ConfigError as error:
        return None, str(error)
    try:
        check_change(context, after)
    except ConfigError as error:
        return after, str(error)
    return after, ""


@pytest.mark.many
@settings(max_examples=examples(600), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=st.sampled_from(VALUES))
def test_random_key_change_is_accepted_or_refused(run: RunContext, key: str, value: str) -> None:
    override = f"{key.replace('prompts.', 'prompts.0.')}={value}"
    after, why = verdict(run, override)
    if after is None or why:
        assert why
        assert "Traceback" not in why
        return
    changes = diff_trees(tree_of(run.config), tree_of(after))
    assert not any(change.key.partition(".")[0] in ("policy", "prompts", "seed", "name") for change in changes)


@pytest.mark.long
def test_every_changed_key_takes_effect_or_is_refused(run: RunContext, tmp_path: Path) -> None:
    """Each allowed change is made on a copy of the run: it is recorded and read back, and the audit is clean."""
    changed, said = set[str](), dict[str, str]()
    copied = copy_of(run, tmp_path / "runs" / "small")
    for key in KEYS:
        for value in VALUES:
            override = f"{key.replace('prompts.', 'prompts.0.')}={value}"
            after, why = verdict(copied, override)
            if after is None or after == copied.config:
                continue
            if why:
                said[key] = why
                continue
            if not preflighted(copied, override):
                continue
            copied = RunContext(copied.uri, copied.cache)
            assert copied.config == after
            changed.add(key)
            break
    assert {
        "versions",
        "train.learning_rate",
        "rollout.patience_seconds",
        "reward.workers",
        "evaluation.every",
    } <= changed
    assert {"seed", "store.state_every", "train.master_dtype", "evaluation.prompts", "groups"} <= said.keys()
    assert len(of_kind(copied.store, ConfigChanged)) == len(changed) > 50
    assert audit(copied.store, deep=True).clean


def preflighted(context: RunContext, override: str) -> bool:
    """Change the config of the run; return False if this machine lacks what the change needs."""
    try:
        record_change(context, [override])
    except ConfigError:
        return False
    return True


def copy_of(run: RunContext, folder: Path) -> RunContext:
    """Make another run with the same objects."""
    store = open_store(str(folder))
    for path in run.store.list(""):
        store.put(path, run.store.get(path))
    return RunContext(store.uri, run.cache)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1", "seed = 1: the key cannot change"),
        ("versions=1", "versions = 1: version 2 is already published; choose 2 or more"),
        ("versions=many", "versions = 'many' is not of type 'integer'"),
        ("learning_rate=1", "learning_rate = 1: there is no such key"),
        ("versions", "is not of the form key=value"),
    ],
)
def test_refused_config_change_ends_with_exit_code_2(
    run: RunContext, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    assert words in refused(capsys, "resume", run.uri, "--set", override)


@pytest.mark.parametrize("override", ["solved_every=2", "solved_every=1", "solved_from=0.5"])
def test_keys_of_solved_questions_cannot_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    """The log counts a source's epochs by the first config of the run."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    file = tmp_path / "questions.jsonl"
    rows = ({"question": f"What is {one} plus {one}?", "answer": str(2 * one)} for one in range(12))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"kind": "jsonl", "path": str(file), "held_out": 0.25, "solved_every": 3}
    context = prepare_small(tmp_path, prompts=[source])
    after, why = verdict(context, f"prompts.0.{override}")
    assert after is not None
    assert why.startswith("prompts")
    assert "the key cannot change" in why


def test_config_changes_of_a_run_are_shown(run: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = copy_of(run, tmp_path / "runs" / "small")
    record_change(copied, ["versions=9", "train.learning_rate=0.25"])
    sentence = "config changed from version 3 on: train.learning_rate 0.001 -> 0.25, versions 4 -> 9"
    for verb in ("inspect", "log"):
        capsys.readouterr()
        assert main([verb, copied.uri]) == 0
        assert sentence in " ".join(capsys.readouterr().out.split())
    assert main(["compare", run.uri, copied.uri]) == 0
    assert "from version 3 0.25" in " ".join(capsys.readouterr().out.split())


def test_resume_of_a_running_run_is_refused(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.flows.commands.resume.is_under_way", lambda context: True)
    with pytest.raises(
        ConfigError, match="a config can change only while its run is stopped; stop the run first: rollflow stop"
    ):
        record_change(RunContext(run.uri, run.cache), ["versions=7"])
    assert not of_kind(run.store, ConfigChanged)
