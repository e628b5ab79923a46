"""What a run's page in Prefect shows beside its graph: a table of its progress, where else to look, the reward plot.

It is a view, and holds up nobody: every method returns at once, and one thread makes the requests. Of a server that is
away, or does not take them, the log says so once; the table is whole again with the next row that arrives.
"""

from __future__ import annotations

import base64
import json
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from pathlib import Path
from uuid import UUID

from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.runtime import flow_run

from rollflow.flows.services.prefect_api import api
from rollflow.storage.errors import Unreachable

END_SECONDS = 10.0


class Page:
    """The artifacts of one supervisor's flow run. Their keys are the run's, so that their history is one."""

    def __init__(self, run_id: str, log: Callable[[str], None]) -> None:
        self._key, self._log = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-"), log
        self._flow_run = UUID(str(flow_run.id))
        self._made: dict[str, UUID] = {}
        self._anchors: list[str] = []
        self._away = False
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        context = copy_context()  # of this flow run: which server it is
        # A daemon: a server that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=lambda: context.run(self._work), name="page", daemon=True)
        self._thread.start()

    def progress(self, rows: Sequence[Mapping[str, object]]) -> None:
        """The table, a row for each block of versions."""
        self._show(
            "progress", "table", json.dumps([dict(row) for row in rows]), "The run so far, by blocks of versions"
        )

    def links(self, places: Mapping[str, str]) -> None:
        """Where else to look: what is there, and its address or command."""
        lines = (f"- {what}: {_linked(where)}" for what, where in places.items())
        self._show("places", "markdown", "\n".join(lines), "Where this run is to be seen")

    def warn(self, text: str) -> None:
        """Show a warning."""
        self._show("warning", "markdown", text, "What to look at")

    def anchor(self, anchor: str) -> None:
        """Show one more hash of an entry of the run's log, for `rollflow audit --anchor`."""
        self._anchors.append(f"- `{anchor}`")
        lines = "\n".join(dict.fromkeys(self._anchors))
        self._show("anchors", "markdown", lines, "Hashes of the run's entries, for rollflow audit --anchor")

    def plot(self, picture: Path) -> None:
        """The reward plot (PNG), in the artifact itself: the page reads no file."""
        # As text, since below an artifact of the kind "image" the page prints the whole address. Prefect's experimental
        # pages show no picture in a text, but the words that stand for it.
        text = base64.b64encode(picture.read_bytes()).decode()
        drawn = f"![The plot is reward.png in the run's storage](data:image/png;base64,{text})"
        self._show("reward", "markdown", drawn, "Reward and held-out accuracy by version")

    def close(self) -> None:
        """Wait for what is under way, for some seconds at most."""
        self._queue.put(None)
        self._thread.join(END_SECONDS)

    def _show(self, name: str, kind: str, data: str, description: str) -> None:
        self._queue.put(lambda: self._put(name, kind, data, description))

    def _work(self) -> None:
        while (put := self._queue.get()) is not None:
            try:
                put()
            except Unreachable as error:
                if not self._away:
                    self._log(f"{error}; the page of this run is not kept up to date meanwhile")
                self._away = True
            else:
                self._away = False

    def _put(self, name: str, kind: str, data: str, description: str) -> None:
        with api() as client:
            if name in self._made:
                client.update_artifact(self._made[name], ArtifactUpdate(data=data))
                return
            made = ArtifactCreate(
                key=f"{name}-{self._key}", type=kind, data=data, description=description, flow_run_id=self._flow_run
            )
            self._made[name] = client.create_artifact(made).id


def _linked(where: str) -> str:
    return f"<{where}>" if where.startswith("http") else f"`{where}`"
