"""Policy versions of a run, on its log: what a version is, is one entry, written after every object it names.

The entry commits together the weights, the learner's state and the batch that was trained on (by its entry); what
was consumed and discarded is in that batch's entry. Objects lie under their writer's claim
(`policies/<v>/<claim>/...`), so that a learner that was deposed has overwritten nothing.

A version is found from the state while it may still be pruned, and by bisection after that: each entry carries the
newest version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollflow.storage.log.entries import Body, Entry, Pruned, VersionPublished
from rollflow.storage.log.lineage import find_version
from rollflow.storage.log.log import Log, Writer
from rollflow.storage.log.retention import Kind
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import Data, pieces
from rollflow.storage.policies import each
from rollflow.storage.records import StoredObject


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A published version."""

    number: int
    entry: int  # of the log
    published: VersionPublished
    claim: int  # of its learner
    at: float  # seconds since the epoch, by the learner's clock

    @classmethod
    def of(cls, entry: Entry) -> PolicyVersion:
        """From the entry that published it."""
        body = entry.body
        assert isinstance(body, VersionPublished)
        return cls(body.number, entry.n, body, entry.claim, entry.at)

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """Weights and state."""
        return (*self.published.weights, *self.published.state)


class VersionLog:
    """Publishes, finds and prunes the versions of one run. See the module's docstring for the guarantees."""

    def __init__(self, log: Log, in_use: Callable[[int], bool] = lambda version: False) -> None:
        """Objects of a version that is `in_use` stay until it is not, whatever retention says."""
        self.log, self.run, self._in_use = log, log.run, in_use

    def stage(self, writer: Writer, version: int, files: Mapping[str, Data]) -> tuple[StoredObject, ...]:
        """Upload objects of a version that is not published yet; names like "weights/model.safetensors"."""

        def staged(name: str) -> StoredObject:
            path, parts = f"policies/{version:08d}/{writer.claim}/{name}", pieces(files[name])
            return StoredObject(path, sum(map(len, parts)), self.run.put(path, parts))

        return tuple(each(staged, files))

    def publish(self, writer: Writer, version: VersionPublished) -> PolicyVersion:
        """Commit a version. What it was trained on is named by its batch's entry.

        Raises:
            Deposed: the run has another learner now.
            Refused: it does not follow, or its batch was voided meanwhile.
        """

        def body(state: RunState, _: object) -> Body:
            return version

        return PolicyVersion.of(writer.append(body))

    def prune(self, writer: Writer) -> tuple[tuple[int, Kind], ...]:
        """Give up what retention releases, first in the log and then in storage; returns what."""
        objects = tuple(one for one in self.log.state.releasable if not self._in_use(one[0]))
        if objects:
            found = {one: self._objects_of(*one) for one in objects}
            writer.append(lambda state, _: Pruned(objects))
            each(self.run.delete, [stored.path for several in found.values() for stored in several])
        return objects

    def _objects_of(self, version: int, kind: Kind) -> tuple[StoredObject, ...]:
        published = self.find(version).published
        return published.weights if kind == "weights" else published.state

    def newest(self) -> int:
        """The newest published version, -1 if there is none. Reads what is new."""
        self.log.follow()
        return self.log.state.version

    def find(self, version: int) -> PolicyVersion:
        """A published version.

        Raises:
            Missing: there is no such version, as far as the log was read.
            Corrupt: an entry on the way to it cannot be read.
        """
        return PolicyVersion.of(find_version(self.log, version).entry)
