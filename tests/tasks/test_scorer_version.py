"""Tests the version of a scorer (a hash): what changes it, which scores contain it, and how a run records and reports a
change.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, get_args

import pytest

from rollflow.flows.locations import attach_run
from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Outcome, Prompt, StopReason
from rollflow.storage.run_records.scorers import ScorerRecord, find_change, read_scorers, store_scorer
from rollflow.tasks.actors.reward import RewardActor
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.run.scorer_versions import list_changed_scorers, record_scorers
from rollflow.tasks.scorers import version
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage
from rollflow.tasks.scorers.config import CodeReward, ExactReward, MathsReward, RewardConfig
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.version import compute_version, describe_scorer, hash_description
from rollflow.tasks.scorers.versioned import VersionedScorer
from rollflow.tasks.scorers.worker import REWARD
from tests.support.recorded import unpack
from tests.support.user_code import put_in_reach
from tests.support.waiting import HANG_SECONDS
from tests.test_rooms import names

FOLDER = Path(version.__file__).parent
WORKER = """
import json, sys, time
print("ready 0123456789ab", flush=True)
for line in sys.stdin:
    time.sleep(600 * json.loads(line)["reference"].get("hangs", 0))
    print(json.dumps([1.0, "fine", "correct", {}, 0.0, "forged"]), flush=True)
"""
OWN = """
from rollflow.tasks.scorers.base import Score

def judge(response: str, reference: dict[str, int]) -> Score:
    return Score(1.0, "")
"""


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def reward(**keys: Any) -> RewardConfig:
    return REWARD.validate_python(keys)


def version_of(**keys: Any) -> str:
    return compute_version(reward(**keys))


def test_every_scorer_kind_lists_its_source_files() -> None:
    kinds = {member.model_fields["kind"].default for member in get_args(get_args(RewardConfig)[0])}
    assert version.SOURCES.keys() == kinds
    files = {file for files in version.SOURCES.values() for file in files}
    assert all((FOLDER / file).is_file() for file in files)


@pytest.mark.parametrize("kind", version.SOURCES)
def test_listed_source_files_of_a_scorer_kind_are_complete(kind: str) -> None:
    """A file that a listed file imports affects scores, too, so it must be listed. Config files are not listed, because
    the version contains the config keys.
    """
    listed, above = {*version.SOURCES[kind], *version.EVERY}, "rollflow.tasks.scorers."
    for file in version.SOURCES[kind]:
        for name in names((FOLDER / file).read_text()):
            module = name.removeprefix(above).rpartition(".")[0].replace(".", "/") + ".py"
            if name.startswith(above) and not module.endswith("config.py"):
                assert module in listed, f"{file} imports {module}"


@pytest.mark.parametrize(
    ("keys", "is_same"),
    [
        ({"workers": 4, "judge_tries": 1, "start_seconds": 3, "max_unjudged": 1, "unjudged": "leave_out"}, True),
        ({"decimals": 3}, False),
        ({"marked": True}, False),
        ({"answer": "tag"}, False),
        ({"deadline_seconds": 1}, False),  # a deadline decides which responses time out
        ({"format": {}}, False),
        ({"correct_from": 0.5}, False),
    ],
)
def test_scorer_version_changes_with_keys_that_affect_scores(keys: dict[str, Any], is_same: bool) -> None:
    assert (version_of(kind="maths", **keys) == version_of(kind="maths")) is is_same


def test_scorer_version_does_not_depend_on_its_section_name() -> None:
    """A worker process does not know the name of its config section, but must report the same version as the reward
    actor.
    """
    config = reward(kind="composite", parts={"a": {"scorer": {"kind": "maths"}}})
    assert compute_version(config, "rewards.far") == compute_version(config)


@pytest.mark.parametrize("package", ["math-verify", "sympy"])
def test_scorer_version_changes_with_its_libraries(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, Any] = {"kind": "composite", "parts": {"a": {"scorer": {"kind": "maths"}}, "b": {}}}
    before, exact = (version_of(kind="maths"), version_of(**parts)), version_of(kind="exact")
    real = version.package_version
    monkeypatch.setattr(version, "package_version", lambda name: "9.9" if name == package else real(name))
    assert version_of(kind="maths") != before[0]
    assert version_of(**parts) != before[1]
    assert version_of(kind="exact") == exact


def test_scorer_version_changes_with_its_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, exact = version_of(kind="choice"), version_of(kind="exact")
    real = version._hash_file
    monkeypatch.setattr(version, "_hash_file", lambda file: "0" if file == "text/marked.py" else real(file))
    assert version_of(kind="choice") != before
    assert version_of(kind="exact") == exact


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        (b'"""Other words."""\n\ndef f(x):\n    "Returns."\n    return x  # why\n', True),
        (b"def f(x):\n    return (x)\n", True),
        (b"def f(x):\n    return x + 1\n", False),
        (b"def f(x, y=1):\n    return x\n", False),
    ],
)
def test_hash_of_code_ignores_comments_and_docstrings(source: bytes, is_same: bool) -> None:
    code = b'"""Words."""\ndef f(x):\n    """Return x."""\n    return x\n'
    assert (version.hash_code(source) == version.hash_code(code)) == is_same


@pytest.mark.parametrize("is_part", [False, True])
def test_scorer_version_changes_with_user_code(is_part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"versioned_{is_part}".lower()
    (file := tmp_path / f"{module}.py").write_text(OWN)
    put_in_reach(monkeypatch, tmp_path)
    own = {"kind": "import", "path": f"{module}:judge"}
    config = reward(kind="composite", parts={"own": {"scorer": own}}) if is_part else reward(**own)
    before = compute_version(config)
    file.write_text(OWN.replace("1.0", "0.5"))
    assert compute_version(config) != before
    file.write_text(OWN)
    assert compute_version(config) == before


async def test_each_score_records_the_scorer_version_of_its_worker() -> None:
    """A score that the pool gives after a missed deadline has the version, too. A verifier cannot set a version."""
    pool = RewardPool(ExactReward(deadline_seconds=1.0), Path())
    pool._command = [sys.executable, "-c", WORKER]
    await pool.start()
    try:
        asked = [ScoreRequest([5], {}), ScoreRequest([5], {"hangs": 1})]
        found = await asyncio.wait_for(pool.score(asked), HANG_SECONDS)
    finally:
        await pool.close()
    assert [score.outcome for score in found] == [Outcome.CORRECT, Outcome.TIMEOUT]
    assert [score.version for score in found] == ["0123456789ab"] * 2


async def test_trajectory_records_the_scorer_version_of_its_score() -> None:
    async def unused(_: object) -> Any: ...

    played = PlayedEpisode(Prompt("p", 0, "d", "", ModelInput.of([1, 2])), 4, unused, unused, unused)
    played.first = VersionedGeneration(Generation("", TokenSpan(), StopReason.STOP), 0)
    [one] = played.trajectories(Score(1.0, version="0123456789ab"))
    assert one.scorer_version == "0123456789ab"
    assert played.trajectories(Score(1.0))[0].scorer_version is None


def test_score_keeps_its_scorer_version_between_processes() -> None:
    sent = json.loads(json.dumps(Score(0.5, "so", parts={"a": 1.0}, version="0123456789ab").to_columns()))
    assert Score.of_columns(sent).version == "0123456789ab"
    assert Score.of_columns(sent[:5]).version == ""


class Away(Scorer):
    """A scorer without worker processes, which returns the futures that a test has prepared."""

    def __init__(self, futures: list[asyncio.Future[Score]]) -> None:
        self.usage, self.futures = ScorerUsage(), futures

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        return self.futures


async def test_score_without_workers_has_its_scorer_version() -> None:
    """Scores get the version. Errors and cancellations are passed on unchanged."""
    futures: list[asyncio.Future[Score]] = [asyncio.get_running_loop().create_future() for _ in range(3)]
    scored, failed, dropped = VersionedScorer(Away(futures), "0123456789ab").submit([])
    futures[0].set_result(Score(0.5, "so"))
    futures[1].set_exception(ConfigError("no worker"))
    dropped.cancel()
    assert (await scored, (await scored).version) == (Score(0.5, "so"), "0123456789ab")
    with pytest.raises(ConfigError, match="no worker"):
        await failed
    await asyncio.sleep(0)
    assert futures[2].cancelled()


# --- the records of a run ------------------------------------------------------------------------------------------


def record(**keys: Any) -> ScorerRecord:
    described = describe_scorer(reward(**keys))
    return ScorerRecord("reward", hash_description(described), described)


def altered(group: str, name: str, value: str) -> ScorerRecord:
    described: dict[str, Mapping[str, Any]] = describe_scorer(MathsReward())
    tree = {**described, group: {**described[group], name: value}}
    return ScorerRecord("reward", hash_description(tree), tree)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (record(kind="maths", decimals=3), "(decimals 6 -> 3)"),
        (altered("libraries", "math-verify", "9.9"), f"(math-verify {package_version('math-verify')} -> 9.9)"),
        (altered("code", "text/maths.py", "0"), "(file text/maths.py)"),
        (altered("own_code", ".parts.a.scorer", "0"), "(the file of .parts.a.scorer)"),
    ],
)
def test_change_of_a_scorer_is_explained(now: ScorerRecord, words: str, memory: MemoryStore) -> None:
    before = record(kind="maths")
    store_scorer(memory, before)
    sentence = find_change(read_scorers(memory), now)
    assert sentence.startswith(f"reward: the scorer has changed from version {before.version} to {now.version}")
    assert sentence.endswith(words)


def test_first_or_unchanged_scorer_is_not_reported(memory: MemoryStore) -> None:
    first = record(kind="maths")
    assert find_change(read_scorers(memory), first) == ""
    store_scorer(memory, first)
    assert find_change(read_scorers(memory), first) == ""
    assert find_change(read_scorers(memory), ScorerRecord("rewards.other", "0" * 12, {})) == ""


def test_scorer_is_compared_with_the_last_used_scorer(memory: MemoryStore) -> None:
    """A return to the first scorer is reported as a change, too."""
    first, second = record(kind="maths"), record(kind="maths", decimals=3)
    store_scorer(memory, first)
    store_scorer(memory, second)
    assert find_change(read_scorers(memory), first).endswith("(decimals 3 -> 6)")
    store_scorer(memory, first)
    assert find_change(read_scorers(memory), first) == ""


def test_damaged_record_of_a_scorer_version_is_skipped(memory: MemoryStore) -> None:
    store_scorer(memory, record(kind="maths"))
    memory.put("scorers/reward/000000000000.json", b"[")
    memory.put("scorers/reward/000000000001.json", b'{"section": "reward"}')
    assert [one.version for one in read_scorers(memory)] == [record(kind="maths").version]


def test_code_scorer_has_a_version_without_a_sandbox() -> None:
    assert len(compute_version(CodeReward())) == version.LENGTH


def test_resumed_run_reports_a_changed_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reward actor logs the change and records the new version. No change is logged for the recorded run, which has
    no record of its scorer.
    """
    context = attach_run(str(unpack("whole", tmp_path)))
    assert record_scorers(context) == []
    RewardActor(context)._build_scorer()
    assert not caplog.messages
    real = version._hash_file
    monkeypatch.setattr(version, "_hash_file", lambda file: "0" if file == "exact.py" else real(file))
    [change] = list_changed_scorers(context)
    assert change.endswith("(file exact.py)")
    RewardActor(context)._build_scorer()
    assert caplog.messages == [f"{change}; `rollflow rejudge` shows what it decides differently"]
    assert list_changed_scorers(context) == []
    assert len(read_scorers(context.store)) == 2
