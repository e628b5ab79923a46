"""Tests that a run's page in Prefect gets its artifacts. An unreachable server is logged once and blocks no caller."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from rollflow.flows.tracking.anchors import write_anchor, write_first_anchor
from rollflow.flows.views import page as page_module
from rollflow.flows.views.page import Page
from rollflow.flows.views.progress_blocks import block_rows
from rollflow.flows.views.summary import summary_bias
from rollflow.storage.audit.anchors import Anchor, check_anchors, parse_anchor
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import Unreachable
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyStore
from rollflow.tasks.run.config import RunConfig
from tests.support.batches import begin, train

PICTURE = base64.b64encode(b"picture").decode()


class Server:
    """Keeps artifacts by key; `away` makes it unreachable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[str, str] = {}
        self.changes: list[str] = []
        self.away = threading.Event()
        self._keys: dict[UUID, str] = {}
        monkeypatch.setattr(page_module, "open_client", self._api)
        monkeypatch.setattr(page_module, "flow_run", SimpleNamespace(id=str(uuid4())))

    @contextlib.contextmanager
    def _api(self) -> Iterator[Any]:
        if self.away.is_set():
            raise Unreachable("the Prefect API: no answer")
        yield SimpleNamespace(create_artifact=self._create, update_artifact=self._update)

    def _create(self, made: Any) -> Any:
        key = uuid4()
        self._keys[key] = made.key
        self.kept[made.key] = made.data
        return SimpleNamespace(id=key)

    def _update(self, key: UUID, changed: Any) -> None:
        self.changes.append(self._keys[key])
        self.kept[self._keys[key]] = changed.data


def test_each_table_of_a_run_page_is_one_prefect_artifact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(monkeypatch)
    page = Page("Mine_1.b", lambda text: None)
    page.progress([{"versions": "1"}])
    page.progress([{"versions": "1"}, {"versions": "2"}])
    page.sandboxes([])
    page.sandboxes([{"kind": "rock"}])
    page.environments([])
    page.environments([{"kind": "trl", "hangs": 2}])
    page.episodes("")
    page.episodes("### Prompt 1.0.0")
    page.links({"MLflow": "http://there", "storage": "s3://here"})
    (tmp_path / "plot.png").write_bytes(b"picture")
    page.plot(tmp_path / "plot.png")
    page.close()
    assert server.kept == {
        "progress-mine-1-b": '[{"versions": "1"}, {"versions": "2"}]',
        "sandboxes-mine-1-b": '[{"kind": "rock"}]',
        "episodes-mine-1-b": "### Prompt 1.0.0",
        "environments-mine-1-b": '[{"kind": "trl", "hangs": 2}]',
        "places-mine-1-b": "- MLflow: <http://there>\n- storage: `s3://here`",
        "reward-mine-1-b": f"![The plot is reward.png in the run's storage](data:image/png;base64,{PICTURE})",
    }
    assert server.changes == ["progress-mine-1-b"]


def test_log_hashes_are_written_to_run_page_and_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hashes of log entry 0 and of the newest entry are written when a supervisor takes over the run and when the
    run ends. No hash is written twice.
    """
    server, logged = Server(monkeypatch), list[Anchor]()
    tracker: Any = SimpleNamespace(log_anchor=logged.append)
    store = open_store(str(tmp_path))
    begin(store)
    train(store, 2)
    page = Page("mine", lambda text: None)
    write_first_anchor(context := SimpleNamespace(store=store, log=Log(store)), tracker, page)  # type: ignore[arg-type]
    write_anchor(context.log.state, tracker, page)
    train(store, 1)
    write_anchor(Log(store).state, tracker, page)
    page.close()
    shown = [parse_anchor(line.strip("- `")) for line in server.kept["anchors-mine"].splitlines()]
    assert shown == list(dict.fromkeys(logged))
    assert [anchor.n for anchor in shown] == [0, context.log.state.n, Log(store).state.n]
    assert check_anchors(store, shown) == []


def test_unreachable_prefect_server_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = Server(monkeypatch), list[str]()
    server.away.set()
    page = Page("mine", told.append)
    for number in range(3):
        page.progress([{"versions": str(number)}])
    flushed = threading.Event()
    page._queue.put(flushed.set)
    flushed.wait()
    server.away.clear()
    page.progress([{"versions": "all"}])
    page.close()
    assert told == ["the Prefect API: no answer; the page of this run is not kept up to date meanwhile"]
    assert server.kept == {"progress-mine": '[{"versions": "all"}]'}


def test_hanging_prefect_server_does_not_block_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    server, go = Server(monkeypatch), threading.Event()
    monkeypatch.setattr(server, "_create", lambda made: SimpleNamespace(id=uuid4(), hung=go.wait()))
    monkeypatch.setattr(page_module, "END_SECONDS", 0.1)
    page = Page("mine", lambda text: None)
    page.progress([])
    page.close()
    assert not server.kept
    go.set()


def test_progress_table_has_only_complete_version_ranges(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    begin(store)
    _, writer = train(store, 5)
    context: Any = SimpleNamespace(policies=PolicyStore(writer.log), store=store, config=RunConfig())
    found = list(block_rows(context, [(1, 2), (3, 4), (5, 6)]))
    assert [row["versions"] for row in found] == ["1 to 2", "3 to 4"]
    told = {"versions", "reward", "staleness", "tokens/s", "idle", "waste", "length bias", "held-out accuracy"}
    assert {*found[0]} == told


@pytest.mark.parametrize(
    ("lost_tokens", "lost_groups", "bias"), [(0.0, 0.0, "+0.0%"), (600.0, 1.0, "-50.0%"), (0.0, 4.0, "+100.0%")]
)
def test_length_bias_in_progress_table_matches_a_hand_example(
    lost_tokens: float, lost_groups: float, bias: str
) -> None:
    """Four groups of 100 tokens were trained; the discarded groups were longer or shorter, or no group was
    discarded.
    """
    found = {"discarded_tokens": lost_tokens, "discarded_groups": lost_groups}
    told = {"response_tokens": 200.0, "reward": 0.0, "staleness_mean": 0.0, "wait_seconds": 0.0}
    one = SimpleNamespace
    versions: Any = [one(claim=0, number=n, at=float(n), metrics=told | (found if n == 1 else {})) for n in range(3)]
    policies = SimpleNamespace(since=lambda first: iter(versions[first:]))
    context: Any = SimpleNamespace(policies=policies, store=None, config=RunConfig(groups=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollflow.flows.views.progress_blocks.read_evaluations", lambda *_: [])
        (row,) = block_rows(context, [(1, 2)])
    assert row["length bias"] == bias
    fates = {"trained": 4, "discarded stale": int(lost_groups), "in flight": 7}
    report = AuditReport(fates=Counter(fates), trained_tokens=400, discarded_tokens=int(lost_tokens))
    assert f"{summary_bias(report):+.1%}" == bias
