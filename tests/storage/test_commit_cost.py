"""What a commit costs, counted: how often it is decided."""

from __future__ import annotations

from typing import Any

import pytest

from rollflow.storage.log import log as log_module
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.log import Log
from rollflow.storage.objects import ObjectStore
from tests.support.batches import ready, staged


def test_a_commit_is_decided_once_and_is_what_its_readers_fold(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, writer = ready(run)
    decided = list[Any]()
    decide = log_module.decide

    def counted(*arguments: Any) -> Any:
        decided.append(arguments)
        return decide(*arguments)

    monkeypatch.setattr(log_module, "decide", counted)
    entry, _ = batches.commit(writer, staged())
    assert len(decided) == 1
    assert isinstance(entry.body, BatchCommitted)
    assert batches.log.state.waiting[0].file == entry.body.file
    assert len(entry.body.file.sha256) == 64
    assert batches.log.state == Log(run).state
