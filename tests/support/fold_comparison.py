"""Compares the state that rollflow computes from a log (the fold) with the plain model of the log (`log_model`), at the
same entry.
"""

from __future__ import annotations

from collections import Counter

from rollflow.storage.log.state import RunState
from tests.support.log_model import Model


def compare(model: Model, state: RunState) -> None:
    """Check that the fold's state at this entry equals that of the model."""
    assert (state.n, state.sha256) == (len(model.entries) - 1, model.hashes[-1])
    if not model.entries:
        return
    _compare_head(model, state)
    compare_dispatches(model, state)
    _compare_totals(model, state)
    _compare_retention(model, state)


def _compare_head(model: Model, state: RunState) -> None:
    assert (state.run_id, state.alpha) == (model.created["run_id"], model.alpha)
    assert state.group_size == model.config["group_size"]
    _compare_configs(model, state)
    assert (state.version, state.next_batch, state.voids) == (model.latest, model.formed, model.voids)
    assert state.published == (model.versions[-1]["n"] if model.versions else -1)
    assert state.holes == model.holes
    names = ("under", "who", "cluster", "host", "process")
    claims = {role: (e["n"], *(e["body"][name] for name in names)) for role, e in model.claims.items()}
    found = {r: (c.entry, c.under, c.who, c.cluster, c.host, c.process) for r, c in state.claims.items()}
    assert found == claims
    for role in ("supervisor", "scheduler", "learner"):
        assert state.newest_claim(role) == (model.claims[role]["n"] if role in model.claims else -1)


def _compare_configs(model: Model, state: RunState) -> None:
    """Compare the config of each version and entry with the config that is found by reading all entries."""
    newest, version = 0, -1
    for n, entry in enumerate(model.entries):
        newest = n if "config" in entry["body"] else newest
        assert state.config_at(n) == newest
        if entry["version"] > version:
            version = entry["version"]
            assert state.config_of(version) == newest
    assert state.config_of(version + 1) == newest


def compare_dispatches(model: Model, state: RunState) -> None:
    """Check that the dispatches and the waiting batches of the fold equal those of the model."""
    assert state.in_flight == tuple(model.open)
    assert list(state.open) == [key.prompt for key in model.open]
    assert state.cursor.issued == tuple(model.issued[source] for source in range(model.sources))
    assert state.cursor.filtered == tuple(map(model.filtered, range(model.sources)))
    assert state.epochs.keys() == {source for source in range(model.sources) if model.skips(source)}
    for source, place in state.epochs.items():
        newest = model.epochs(source)[-1:]
        assert place.end == model.may_issue(source)
        assert (place.entry, place.number) == (newest[0]["n"], newest[0]["body"]["number"]) if newest else (-1, -1)
    assert state.behind == model.left_behind([key.prompt for key in model.open])
    assert state.redraws == model.to_draw_anew()
    assert state.not_finite == len({n for n, _ in model.rejected if n > state.published})
    assert state.waiting.keys() == model.waiting.keys()
    for number, entry in model.waiting.items():
        batch, body = state.waiting[number], entry["body"]
        assert (batch.entry, batch.rows, batch.surplus_tokens) == (entry["n"], body["rows"], body["surplus_tokens"])
        assert {"path": batch.file.path, "size": batch.file.size, "sha256": batch.file.sha256} == body["file"]
        assert [list(group) for group in batch.groups] == body["groups"]
        assert batch.behind == model.left_behind([group[0] for group in body["groups"]])


def _compare_totals(model: Model, state: RunState) -> None:
    ended = {key: fate for key, fate in model.fates.items() if fate not in ("open", "batch")}
    tokens: Counter[str] = Counter()
    for key, fate in ended.items():
        tokens[fate] += model.tokens[key]
    trained = [model.alive[number]["body"] for number in range(model.latest)]
    totals = state.totals
    assert totals.groups == Counter(ended.values())
    assert totals.tokens == tokens
    assert totals.staleness == Counter(body["number"] - group[2] for body in trained for group in body["groups"])
    alpha = max(config["async_ratio"] for config in model.configs)
    assert all(0 <= aged <= alpha or aged < 0 for aged in totals.staleness)
    assert totals.rows == sum(body["rows"] for body in trained)
    assert totals.surplus_tokens == sum(body["surplus_tokens"] for body in trained)


def _compare_retention(model: Model, state: RunState) -> None:
    assert sorted(state.releasable) == sorted(model.may_be_pruned())
    assert all(state.held[version][kind] == model.versions[version]["n"] for version, kind in state.releasable)
    left = len(state.held) - len({version for version, _ in model.may_be_pruned()})
    assert left <= state.retention.window + 1, "what is held does not grow"
