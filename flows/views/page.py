"""Writes the artifacts on a run's page in Prefect: tables of the progress, of the sandboxes and of the environments,
links, episodes turn by turn, and the reward plot. A background thread sends the requests, so only the method `close`
waits for Prefect. A failed request is logged only once, and the next update writes the whole progress table.
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

from rollflow.flows.registration.prefect_api import open_client
from rollflow.storage.errors import Unreachable

END_SECONDS = 10.0


class Page:
    """Writes the artifacts of one supervising flow run in Prefect. The keys of the artifacts contain the run id, so
    that a restarted supervising flow run writes to the same artifacts.
    """

    def __init__(self, run_id: str, log: Callable[[str], None]) -> None:
        self._key, self._log = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-"), log
        self._flow_run = UUID(str(flow_run.id))
        self._made: dict[str, UUID] = {}
        self._anchors: list[str] = []
        self._away = False
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        context = copy_context()  # A copy of the flow run's context, which names the Prefect server.
        # A daemon thread does not keep the process from ending if the server hangs.
        self._thread = threading.Thread(target=lambda: context.run(self._work), name="page", daemon=True)
        self._thread.start()

    def progress(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the table of the run's progress, with one row for each block of policy versions."""
        self._show(
            "progress", "table", json.dumps([dict(row) for row in rows]), "The run so far, by blocks of versions"
        )

    def sandboxes(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the table of the run's sandboxes, with one row for each kind that was used."""
        if rows:
            data = json.dumps([dict(row) for row in rows])
            self._show("sandboxes", "table", data, "The sandboxes of the run, by kind")

    def environments(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the table of the run's environments, with one row for each kind with worker processes or tools."""
        if rows:
            data = json.dumps([dict(row) for row in rows])
            self._show("environments", "table", data, "The environments of the run, by kind")

    def episodes(self, text: str) -> None:
        """Show episodes turn by turn, as Markdown; write nothing if there are none."""
        if text:
            self._show("episodes", "markdown", text, "Two episodes of the newest version, turn by turn")

    def links(self, places: Mapping[str, str]) -> None:
        """Write the list of links, in which each name has an address or a command."""
        lines = (f"- {what}: {_write_link(where)}" for what, where in places.items())
        self._show("places", "markdown", "\n".join(lines), "Where to see this run")

    def warn(self, text: str) -> None:
        """Show a warning."""
        self._show("warning", "markdown", text, "What to look at")

    def anchor(self, anchor: str) -> None:
        """Add the hash of a log entry to the page's list of anchors, which users give to `rollflow audit --anchor`."""
        self._anchors.append(f"- `{anchor}`")
        lines = "\n".join(dict.fromkeys(self._anchors))
        self._show("anchors", "markdown", lines, "Hashes of the run's entries, for rollflow audit --anchor")

    def plot(self, picture: Path) -> None:
        """Show the reward plot (PNG). The picture of the plot is embedded in the artifact, because Prefect's page
        cannot read a file.
        """
        # a Markdown artifact, because below an artifact of the kind "image" Prefect prints the whole address
        text = base64.b64encode(picture.read_bytes()).decode()
        drawn = f"![The plot is reward.png in the run's storage](data:image/png;base64,{text})"
        self._show("reward", "markdown", drawn, "Reward and held-out accuracy by version")

    def close(self) -> None:
        """Wait until Prefect has received the pending requests, but at most `END_SECONDS`."""
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
        with open_client() as client:
            if name in self._made:
                client.update_artifact(self._made[name], ArtifactUpdate(data=data))
                return
            artifact = ArtifactCreate(
                key=f"{name}-{self._key}", type=kind, data=data, description=description, flow_run_id=self._flow_run
            )
            self._made[name] = client.create_artifact(artifact).id


def _write_link(where: str) -> str:
    return f"<{where}>" if where.startswith("http") else f"`{where}`"
