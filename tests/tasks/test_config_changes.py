"""Tests that a changed config is recorded once or refused by key, and that versions are trained with their config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands.replay import ReplayOutcome, replay
from rollflow.flows.commands.resume import record_change
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.storage.log.entries import ConfigChanged, VersionPublished, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import Deposed
from rollflow.storage.objects import open_store
from rollflow.storage.objects.local import LocalStore
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import change_config
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import new_learner, restore
from tests.support.described import describe
from tests.support.log_runs import of_kind
from tests.support.policy_folders import change_json
from tests.support.small_run import (
    ALL_ROLES,
    SUMS,
    Halt,
    StoreFeed,
    copy_run,
    make_policy,
    prepare_small,
    train_small,
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """Make a finished run of two versions; a test works on a copy."""
    return train_in(tmp_path_factory.mktemp("home"), versions=2, until=None)


@pytest.fixture(scope="module")
def halted(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """Make a run of two of four versions, with a batch that waits; a test works on a copy."""
    return train_in(tmp_path_factory.mktemp("home"), versions=4, until=2)


def train_in(home: Path, versions: int, until: int | None) -> RunContext:
    """Train a run of `versions` versions, and stop before batch `until`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        context = prepare_small(home, versions=versions)
        train_small(context, until=until)
    return context


def again(context: RunContext) -> RunContext:
    """Open the run as another process does."""
    return RunContext(context.uri, context.cache)


def replayed(context: RunContext) -> list[ReplayOutcome]:
    """Train all versions again."""
    found: list[ReplayOutcome] = []
    replay(again(context), None, True, print, found.append)
    return found


def rates(context: RunContext) -> list[float]:
    """Return the learning rate that each version was trained with."""
    return [one.body.metrics["learning_rate"] for one in published(context)[1:]]


def published(context: RunContext) -> list[Any]:
    return of_kind(context.store, VersionPublished)


CHANGES: Sequence[Any] = (
    pytest.param(["versions=5", "train.learning_rate=0.002"], marks=pytest.mark.soak),
    pytest.param(["versions=5", "train.schedule=linear"], marks=pytest.mark.soak),
    ["versions=5", "train.minibatches=1", "train.weight_decay=0.1", "train.betas=[0.5, 0.6]", "store.shard_bytes=4096"],
    ["versions=5", "async_ratio=2", "train.objective.surrogate.high=0.5", "train.reference.every=3"],
)


@pytest.mark.long
@pytest.mark.parametrize("overrides", CHANGES)
def test_finished_run_continues_with_a_changed_config(tmp_path: Path, overrides: Sequence[str]) -> None:
    """The continued run is trained, replayed and restored bit for bit, whatever the learner's state contains."""
    context = prepare_small(tmp_path, versions=3, train=ALL_ROLES, keep_every=1)
    train_small(context)
    before = context.config
    record_change(again(context), overrides)
    context = again(context)
    assert context.config_at(3) == before
    assert context.config_at(4) == context.config != before
    train_small(context)
    assert audit(context.store, deep=True).clean
    outcomes = replayed(context)
    assert [one.replayed.version.number for one in outcomes] == [1, 2, 3, 4, 5]
    assert all(not one.replayed.differences for one in outcomes)


def test_learning_rates_follow_the_config_of_each_version(tmp_path: Path) -> None:
    context = prepare_small(tmp_path, versions=2, train={"learning_rate": 1e-3})
    train_small(context)
    record_change(again(context), ["versions=4", "train.learning_rate=0.002"])
    train_small(again(context))
    record_change(again(context), ["versions=6", "train.schedule=linear"])
    train_small(again(context))
    assert rates(context) == pytest.approx([1e-3, 1e-3, 2e-3, 2e-3, 2e-3 * 2 / 6, 2e-3 / 6])
    assert all(not one.replayed.differences for one in replayed(context))


def test_restore_replays_versions_of_an_older_config(tmp_path: Path) -> None:
    """Only the base version has a stored learner state; later versions were trained with the earlier config."""
    context = prepare_small(tmp_path, versions=5, state_every=4, keep_last=9)
    train_small(context, until=3)
    record_change(again(context), ["train.learning_rate=0.01"])
    learner = new_learner(again(context), blank=True)
    found = restore(context.policies, context.batches, learner, 3)
    assert (found.base, found.replayed, found.differed) == (0, 3, [])
    train_small(again(context))
    assert all(not one.replayed.differences for one in replayed(context))
    assert rates(context) == pytest.approx([1e-3, 1e-3, 1e-3, 1e-2, 1e-2])


def test_repeated_config_change_adds_no_entry(short: RunContext, tmp_path: Path) -> None:
    context = copy_run(short, tmp_path / "small")
    for _ in range(3):
        record_change(again(context), ["versions=4"])
        assert not change_config(again(context), again(context).config)
    [entry] = of_kind(context.store, ConfigChanged)
    assert isinstance(entry.body, ConfigChanged)
    assert (entry.body.version, entry.body.changes) == (3, (("versions", 2, 4),))


def test_old_learner_cannot_publish_after_a_config_change(tmp_path: Path) -> None:
    """The old learner has already trained the next version; its successor trains it under the new config."""
    context = prepare_small(tmp_path, versions=4)
    feed = StoreFeed(context, until=2)
    old = LearnerActor(context, channel=feed)
    with pytest.raises(Halt):
        old.run()
    record_change(again(context), ["train.learning_rate=0.003"])
    feed.until = 4
    old._train_next(2)
    with pytest.raises(Deposed, match="config was changed"):
        old._settle()
    train_small(again(context))
    assert rates(context) == pytest.approx([1e-3, 1e-3, 3e-3, 3e-3])


REFUSED = {
    "seed=1": "seed = 1: the key cannot change",
    "name=other": "name = 'other': the key cannot change",
    "policy.dtype=bfloat16": "policy.dtype = 'bfloat16': the key cannot change, because version 0 was made",
    "prompts.0.share=2": "prompts = [...]: the key cannot change, because the log names prompts",
    "evaluation.prompts=8": "evaluation.prompts = 8: the key cannot change, because it decides which prompts",
    "store.uri=/elsewhere": "store.uri = '/elsewhere': the key cannot change, because the run is stored in this store",
    "store.state_every=3": "store.state_every = 3: the key cannot change",
    "reward.kind=exact": "reward.kind = 'exact': the key cannot change",
    "train.lora.rank=4": "train.lora = ",
    "train.master_dtype=policy": "train.master_dtype = 'policy': the key cannot change",
    "versions=1": "versions = 1: version 2 is already published; choose 2 or more",
    "async_ratio=0": "async_ratio = 0: the batches that wait for the learner (2) have groups that are 1 versions old",
    "groups=4": "groups = 4: the batches that wait for the learner (2) were formed with 2; train on these",
    "engine.temperature=0.5": "engine.temperature = 0.5: the batches that wait",
    "engine.max_new_tokens=4": "engine.max_new_tokens = 4: the batches that wait",
    "train.objective.penalties.kl_target=0.1": "train.objective.penalties.kl_target = 0.1: kl_target adapts kl_weight",
    "train={learning_rate=0.1, objective={kind='ppo'}}": "needs a critic",
}


@pytest.mark.parametrize("override", REFUSED)
def test_invalid_config_change_gets_a_one_sentence_error(halted: RunContext, tmp_path: Path, override: str) -> None:
    context = copy_run(halted, tmp_path / "small")
    with pytest.raises(ConfigError) as refused:
        record_change(again(context), [override])
    assert REFUSED[override] in str(refused.value)
    assert not of_kind(context.store, ConfigChanged)
    assert context.log.state == Log(context.store).state


def test_config_change_to_longer_responses_is_refused(short: RunContext, tmp_path: Path) -> None:
    """`max_new_tokens` decides which prompts fit, so another limit could give an index another prompt."""
    context = copy_run(short, tmp_path / "small")
    with pytest.raises(ConfigError, match=r"max_new_tokens = 16: .* leave room for 8 tokens .*; choose 8 or less"):
        record_change(again(context), ["versions=3", "engine.max_new_tokens=16"])
    before = [context.prompts().prompt(index) for index in range(8)]
    record_change(again(context), ["versions=3", "engine.max_new_tokens=4"])
    assert [again(context).prompts().prompt(index) for index in range(8)] == before
    record_change(again(context), ["engine.max_new_tokens=8"])


def test_versions_are_evaluated_by_their_own_config(tmp_path: Path) -> None:
    """After a change to more frequent evaluations, no version is evaluated whose weights are already deleted."""
    context = prepare_small(tmp_path, versions=3)
    train_small(context)
    record_change(again(context), ["versions=7", "evaluation.every=2"])
    assert [version for version in range(8) if again(context).evaluates(version)] == [0, 3, 4, 6, 7]
    record_change(again(context), ["versions=5", "evaluation.every=0"])
    assert [version for version in range(8) if again(context).evaluates(version)] == [0, 3, 5]


def test_config_of_a_run_older_than_a_key_can_be_changed(tmp_path: Path) -> None:
    """The recorded config lacks some keys, and has one key in an older place; the change leaves both as they are."""
    tree = RunConfig().model_dump(mode="json")
    for key in ("fused_adamw", "share_prefixes", "objective"):
        del tree["train"][key]
    tree["train"]["negative_weight"] = 0.5
    store = open_store(str(tmp_path / "runs" / "old"))
    describe(store, "old", tree)
    context = RunContext(store.uri, tmp_path / "cache")
    before = context.config
    train = before.train.model_copy(update={"learning_rate": 0.25})
    assert change_config(context, before.model_copy(update={"train": train}))
    recorded = context.configs[-1]
    assert recorded.changes == (("train.learning_rate", 5e-4, 0.25),)
    assert recorded.config == {**tree, "train": {**tree["train"], "learning_rate": 0.25}}
    assert (context.config.train.fused_adamw, context.config.train.objective) == (False, before.train.objective)


def test_config_change_does_not_alter_a_recorded_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older run has end tokens that a new run must not have, and keeps them after a change of its config."""
    make_policy(tmp_path / "policy")
    change_json(tmp_path / "policy" / "tokenizer_config.json", eos_token="<|pad|>")
    with monkeypatch.context() as patch:
        for check in ("name_end_tokens", "check_new_run"):
            patch.setattr(f"rollflow.flows.preflight.{check}", lambda *given: None)
        context = prepare_small(tmp_path, versions=2, prompts=[{**SUMS, "system": "Be kind."}])
    ends = again(context).tokenizer.stop_tokens
    record_change(again(context), ["versions=3"])
    assert (again(context).config.versions, again(context).tokenizer.stop_tokens) == (3, ends)
    assert audit(context.store, deep=True).violations == []
    with pytest.raises(ConfigError, match=r"engine\.temperature = 0\.001"):
        record_change(again(context), ["engine.kind=vllm", "engine.temperature=0.001"])


def test_batch_keys_may_be_changed_if_no_batch_waits(short: RunContext, tmp_path: Path) -> None:
    context = copy_run(short, tmp_path / "small")
    record_change(again(context), ["versions=3", "group_size=6", "groups=3", "engine.temperature=0.5", "async_ratio=0"])
    found: RunConfig = again(context).config
    assert (found.group_size, found.groups, found.engine.temperature, found.async_ratio) == (6, 3, 0.5, 0)


class Killed(BaseException):
    """Raised in place of a kill of the process."""


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after it"])
@pytest.mark.parametrize("entry", [0, 1], ids=["claim", "change"])
def test_config_change_interrupted_by_a_kill_is_made_once(
    short: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: int, after: bool
) -> None:
    """The command is killed before or after it appends a log entry. After a repetition, there is one change."""
    context = copy_run(short, tmp_path / "small")
    place = entry_path(again(context).log.state.n + 1 + entry)
    create = LocalStore.create

    def killed(store: LocalStore, path: str, data: Any) -> None:
        if path == place and not after:
            raise Killed
        create(store, path, data)
        if path == place:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", killed)
        with pytest.raises(Killed):
            record_change(again(context), ["versions=4", "train.learning_rate=0.002"])
    assert len(of_kind(context.store, ConfigChanged)) == (entry == 1 and after)
    for _ in range(2):
        record_change(again(context), ["versions=4", "train.learning_rate=0.002"])
    assert len(of_kind(context.store, ConfigChanged)) == 1
    train_small(again(context))
    assert audit(context.store, deep=True).clean
    assert rates(context) == pytest.approx([1e-3, 1e-3, 2e-3, 2e-3])


def test_config_change_with_a_lost_response_adds_one_entry(
    short: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = copy_run(short, tmp_path / "small")
    place = again(context).log.state.n + 2
    create, lost = LocalStore.create, [entry_path(place)]

    def unanswered(store: LocalStore, path: str, data: Any) -> None:
        create(store, path, data)
        if path in lost:
            lost.remove(path)
            raise Unreachable(f"{path}: written, and the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", unanswered)
        record_change(again(context), ["versions=4"])
    assert not lost
    assert [entry.n for entry in of_kind(context.store, ConfigChanged)] == [place]


def test_two_equal_config_changes_add_one_log_entry(short: RunContext, tmp_path: Path) -> None:
    """Another command records the same change after this command's read and before its append."""
    context = copy_run(short, tmp_path / "small")
    slow, after = again(context), context.config.model_copy(update={"versions": 5})
    assert slow.config.versions == 2  # the slow command has read the config
    real = slow.log.claim

    def claim(*given: Any, **more: Any) -> Any:
        assert change_config(again(context), after)
        return real(*given, **more)

    object.__setattr__(slow.log, "claim", claim)
    assert not change_config(slow, after)
    assert len(of_kind(context.store, ConfigChanged)) == 1
