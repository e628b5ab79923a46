"""Tests that an independent checker (the plain model of the log in `tests/support`) finds faults that were planted in a
run's folder: in the hash chain, in the outcomes of prompts, and in files.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log import entries as entries_module
from rollflow.storage.log.entries import entry_path, seal_tree
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.records import DiscardReason
from tests.support import log_model
from tests.support.log_actors import Learner, Scheduler, Supervisor, create_run
from tests.support.log_model import Illegal, read_run

ALPHA = 2.5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run at alpha 2.5 with discards of each reason, a batch that was voided and formed again, and a waiting
    batch.
    """
    run = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        # a small limit, so that a batch with many discards has an index object
        patched.setattr(entries_module, "LARGEST", 1_000)
        write(LocalStore(run))
    return run


def write(store: LocalStore) -> None:
    create_run(store, ALPHA)
    supervisor = Supervisor(store)
    scheduler, learner = Scheduler(store, supervisor.writer.claim, arrow=True), Learner(store, supervisor.writer.claim)
    learner.publish()
    for number in range(7):
        scheduler.log.follow()
        for reason in list(DiscardReason)[:number] * number:
            scheduler.dispatch(scheduler.log.state.version)
            scheduler.discard(-1, reason)
        scheduler.commit()
        learner.log.follow()
        if number == 3:
            learner.void(3)
            scheduler.log.follow()
            scheduler.begin()
            scheduler.commit()
            learner.log.follow()
        if number != 5:
            learner.publish()
            learner.prune()


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """Copy the run, to plant a fault in the copy."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def tree(run: Path, n: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / entry_path(n)).read_bytes())
    found.pop("seal")
    return found


def numbers(run: Path, kind: str) -> list[int]:
    """Return the numbers of all log entries of a kind, except entries with an index object."""
    found = (tree(run, n) for n in range(len(list((run / "log").iterdir()))))
    return [one["n"] for one in found if one["body"]["kind"] == kind and "index" not in one]


def forge(run: Path, n: int, change: Callable[[Any], None]) -> None:
    """Replace the body of entry `n`, and recompute the hash chain, as an attacker who can write the whole log could."""
    one = tree(run, n)
    change(one["body"])
    data = seal_tree(one)
    (run / entry_path(n)).write_bytes(data)
    for following in range(n + 1, len(list((run / "log").iterdir()))):
        data = seal_tree(tree(run, following) | {"prev": hashlib.sha256(data).hexdigest()})
        (run / entry_path(following)).write_bytes(data)


def violation(run: Path) -> str:
    """Return the fault that the checker finds in the run; return "" if it finds none."""
    try:
        read_run(run)
    except Illegal as why:
        return str(why)
    return ""


def test_independent_log_checker_imports_nothing_of_rollflow() -> None:
    """The checker may import rollflow only for annotations (`if TYPE_CHECKING`), which are not imported when it
    runs.
    """
    tree = ast.parse(Path(log_model.__file__).read_text())
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("rollflow", "tests"))]
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import) and node not in tree.body]
    [guard] = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(guard.test) == "TYPE_CHECKING"
    assert inner == guard.body


def test_independent_checker_finds_no_fault_in_a_correct_run(run: Path) -> None:
    assert violation(run) == ""
    assert list((run / "log_index").iterdir())
    assert numbers(run, "batch-voided")


# --- faults in the log's hash chain -------------------------------------------------------------------------------


def test_independent_checker_finds_an_altered_alpha(run: Path) -> None:
    path = run / entry_path(0)
    path.write_bytes(path.read_bytes().replace(b'"async_ratio":2.5', b'"async_ratio":9.5'))
    assert violation(run) == "0: its seal"


def test_independent_checker_finds_altered_alpha_and_new_hashes(run: Path) -> None:
    one = tree(run, 0)
    one["body"]["config"]["async_ratio"] = 9.5
    (run / entry_path(0)).write_bytes(seal_tree(one))
    assert violation(run) == "1: its chain"


def test_independent_checker_finds_groups_too_old_for_alpha(run: Path) -> None:
    """The hash chain is valid, but a batch's groups were started before the version that synchronous mode requires."""
    forge(run, 0, lambda body: body["config"].update(async_ratio=0))
    assert violation(run).endswith(": stale")


def test_independent_checker_finds_a_missing_log_entry(run: Path) -> None:
    (run / entry_path(5)).unlink()
    assert violation(run) == "5: its name"


def test_independent_checker_finds_swapped_log_entries(run: Path) -> None:
    one, other = run / entry_path(5), run / entry_path(6)
    swapped = other.read_bytes(), one.read_bytes()
    one.write_bytes(swapped[0])
    other.write_bytes(swapped[1])
    assert violation(run) == "5: its number"


def test_independent_checker_finds_an_inserted_log_entry(run: Path) -> None:
    newest = len(list((run / "log").iterdir())) - 1
    for n in reversed(range(5, newest + 1)):
        (run / entry_path(n)).rename(run / entry_path(n + 1))
    (run / entry_path(5)).write_bytes((run / entry_path(4)).read_bytes())
    assert violation(run) == "5: its number"


def test_independent_checker_finds_an_altered_newest_log_entry(run: Path) -> None:
    path = run / entry_path(len(list((run / "log").iterdir())) - 1)
    path.write_bytes(path.read_bytes().replace(b'"role":"', b'"role":"x'))
    assert violation(run).endswith(": its seal")


def test_independent_checker_finds_an_altered_index_object(run: Path) -> None:
    path = next((run / "log_index").iterdir())
    path.write_bytes(path.read_bytes() + b" ")
    assert violation(run).endswith(": its index")


# --- faults in the contents of entries ----------------------------------------------------------------------------


def test_independent_checker_finds_responses_that_are_too_old(run: Path) -> None:
    n = numbers(run, "batch-committed")[-1]
    number, oldest = tree(run, n)["body"]["number"], 0

    def older(body: Any) -> None:
        body["groups"][0][2] = oldest

    assert number - oldest > ALPHA
    forge(run, n, older)
    assert violation(run) == f"{n}: stale"


def test_independent_checker_finds_a_group_twice_in_one_batch(run: Path) -> None:
    n = numbers(run, "batch-committed")[0]
    forge(run, n, lambda body: body.update(groups=[body["groups"][0]] * 2))
    assert violation(run) == f"{n}: GroupKey(prompt=0, attempt=0) is not open"


def test_independent_checker_finds_a_group_in_two_batches(run: Path) -> None:
    first, second = numbers(run, "batch-committed")[:2]
    (prompt, attempt, *_), *_ = tree(run, first)["body"]["groups"]
    forge(run, second, lambda body: body["groups"].__setitem__(0, [prompt, attempt, 1, 1, 7]))
    assert violation(run) == f"{second}: GroupKey(prompt={prompt}, attempt={attempt}) is not open"


def test_independent_checker_finds_a_prompt_trained_on_twice(run: Path) -> None:
    first, second = numbers(run, "batch-committed")[:2]
    (prompt, attempt, *_), *_ = tree(run, first)["body"]["groups"]
    forge(run, second, lambda body: body["groups"].__setitem__(0, [prompt, attempt + 1, 1, 1, 7]))
    assert violation(run) == f"{second}: GroupKey(prompt={prompt}, attempt={attempt + 1}) is not open"


def test_independent_checker_finds_an_attempt_with_two_outcomes(run: Path) -> None:
    n = numbers(run, "batch-committed")[0]
    forge(run, n, lambda body: body["discards"].append([body["groups"][0][:2], "stale", 0, 3]))
    assert violation(run) == f"{n}: GroupKey(prompt=0, attempt=0) is not open"


def test_independent_checker_finds_a_prompt_issued_twice(run: Path) -> None:
    first, second = numbers(run, "batch-committed")[:2]
    prompt = tree(run, first)["body"]["issued"][0]
    forge(run, second, lambda body: body["issued"].append(prompt))
    assert violation(run) == f"{second}: out of its source's order"


def test_independent_checker_finds_a_void_of_a_trained_batch(run: Path) -> None:
    (n,) = numbers(run, "batch-voided")
    forge(run, n, lambda body: body.update(number=1))
    assert violation(run) == f"{n}: does not wait"


def test_independent_checker_finds_a_version_of_a_wrong_batch(run: Path) -> None:
    n = numbers(run, "version-published")[2]
    other = numbers(run, "batch-committed")[0]
    forge(run, n, lambda body: body.update(batch_entry=other))
    assert violation(run) == f"{n}: not of its batch"


def test_independent_checker_finds_a_version_without_a_batch(run: Path) -> None:
    n = numbers(run, "version-published")[2]
    forge(run, n, lambda body: body.update(batch_entry=None))
    assert violation(run) == f"{n}: not of its batch"


def test_independent_checker_finds_a_skipped_version(run: Path) -> None:
    n = numbers(run, "version-published")[-1]
    forge(run, n, lambda body: body.update(number=body["number"] + 1))
    assert violation(run) == f"{n}: not the next version, or nothing"


# --- faults in the batches' files ---------------------------------------------------------------------------------


def with_rows(run: Path, change: Callable[[TrajectoryBatch], TrajectoryBatch]) -> int:
    """Replace the rows of the newest batch, with a matching hash; return the batch's number."""
    n = numbers(run, "batch-committed")[-1]
    path = run / tree(run, n)["body"]["file"]["path"]
    data = bytes(change(TrajectoryBatch.from_bytes(path.read_bytes())).to_bytes())
    path.write_bytes(data)
    forge(run, n, lambda body: body["file"].update(size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return int(tree(run, n)["body"]["number"])


def test_independent_checker_finds_a_response_older_than_group(run: Path) -> None:
    def older(batch: TrajectoryBatch) -> TrajectoryBatch:
        first, *others = batch.groups()
        *fresh, last = first.trajectories
        return TrajectoryBatch.from_groups(
            [replace(first, trajectories=(*fresh, replace(last, started_version=0))), *others]
        )

    number = with_rows(run, older)
    assert violation(run) == f"batch {number}: a row is stale"


def test_independent_checker_finds_a_group_with_few_responses(run: Path) -> None:
    number = with_rows(run, lambda batch: TrajectoryBatch(batch.table.slice(1)))
    assert violation(run) == f"batch {number}: its rows are not those of its groups"


def test_independent_checker_finds_an_altered_batch_file(run: Path) -> None:
    n = numbers(run, "batch-committed")[-1]
    path = run / tree(run, n)["body"]["file"]["path"]
    path.write_bytes(path.read_bytes()[:-1])
    assert violation(run) == f"batch {tree(run, n)['body']['number']}: not the file that was committed"


def test_batch_in_an_unknown_format_is_checked_by_its_log_entry(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    create_run(store, ALPHA)
    supervisor = Supervisor(store)
    scheduler, learner = Scheduler(store, supervisor.writer.claim), Learner(store, supervisor.writer.claim)
    learner.publish()
    scheduler.log.follow()
    scheduler.commit()
    assert violation(tmp_path) == ""
    n = numbers(tmp_path, "batch-committed")[0]
    forge(tmp_path, n, lambda body: body["groups"][0].__setitem__(2, -3))
    assert violation(tmp_path) == f"{n}: stale"
