"""Simulates an attacker with write access to a run's storage, who alters objects and recomputes all hashes that depend
on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted, Entry, RunCreated, VersionPublished
from rollflow.storage.records import Discard, StoredObject, Trajectory, TrajectoryGroup
from rollflow.tasks.run.context import RunContext
from tests.support.log_runs import committed, published, read, rewritten, sha256_of, told

Groups = list[TrajectoryGroup]


@dataclass(frozen=True)
class Forger:
    """An attacker who alters one run (see the module's docstring)."""

    context: RunContext

    @property
    def store(self) -> Any:
        """The run's storage."""
        return self.context.store

    # --- entries ------------------------------------------------------------------------------------------------

    def log(self, change: Callable[[list[Entry]], list[Entry]]) -> None:
        """Replace all log entries, and compute their numbers and hashes again."""
        rewritten(self.store, change(read(self.store)))

    def entry(self, n: int, change: Callable[[Entry], Entry]) -> None:
        """Replace entry `n`."""
        self.log(lambda entries: [change(one) if one.n == n else one for one in entries])

    def batch(self, number: int, change: Callable[[BatchCommitted], BatchCommitted]) -> None:
        """Replace the commit of batch `number`."""
        self.entry(committed(self.store, number).n, lambda one: replace(one, body=change(one.body)))  # type: ignore[arg-type]

    def version(self, number: int, change: Callable[[VersionPublished], VersionPublished]) -> None:
        """Replace the entry of version `number`."""
        self.entry(published(self.store, number).n, lambda one: replace(one, body=change(one.body)))  # type: ignore[arg-type]

    def creation(self, change: Callable[[RunCreated], RunCreated]) -> None:
        """Replace entry 0."""
        self.entry(0, lambda one: replace(one, body=change(one.body)))  # type: ignore[arg-type]

    def config(self, change: Mapping[str, Any]) -> None:
        """Replace keys of the config, and the config's hash. In a section, only the given keys are replaced."""

        def changed(body: RunCreated) -> RunCreated:
            config = dict(body.config)
            for key, value in change.items():
                config[key] = {**config[key], **value} if isinstance(value, Mapping) else value
            return replace(body, config=config, config_sha256=sha256_of(config))

        self.creation(changed)

    def discard(self, number: int, **change: Any) -> None:
        """Replace the first discard of batch `number`."""

        def changed(discards: tuple[Discard, ...]) -> tuple[Discard, ...]:
            return (discards[0]._replace(**change), *discards[1:])

        self.batch(number, lambda body: replace(body, discards=changed(body.discards)))

    # --- objects ------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> StoredObject:
        """Write other bytes to a path."""
        return StoredObject(path, len(data), self.store.put(path, data))

    def begun_with(self, path: str, data: bytes) -> None:
        """Replace a file of the policy with which the run began."""
        stored = self.put(path, data)
        files = lambda body: tuple(stored if one.path == path else one for one in body.policy)  # noqa: E731
        self.creation(lambda body: replace(body, policy=files(body)))

    def policy(self, name: str, **change: Any) -> None:
        """Change keys of a JSON file of the policy."""
        path = f"policy/{name}"
        self.begun_with(path, json.dumps({**json.loads(self.store.get(path)), **change}).encode())

    def pin(self, which: int, **change: Any) -> None:
        """Replace the pin (the recorded hash) of a prompt source."""

        def changed(body: RunCreated) -> RunCreated:
            pins = [{**pin, **change} if place == which else pin for place, pin in enumerate(body.prompts)]
            return replace(body, prompts=tuple(pins))

        self.creation(changed)

    def file_of_prompts(self, change: Callable[[bytes], bytes]) -> None:
        """Replace a prompt file that the run has stored, and record the new hash in its pin."""
        pin = self.context.created.prompts[0]
        stored = self.put(pin["kept"], change(self.store.get(pin["kept"])))
        self.pin(0, sha256=stored.sha256, size=stored.size)

    def weights(self, number: int, change: Callable[[bytes], bytes], kind: str = "weights") -> None:
        """Replace weights (or learner state) of a version, under the same name."""
        [stored, *others] = getattr(published(self.store, number).body, kind)
        other = self.put(stored.path, change(self.store.get(stored.path)))
        self.version(number, lambda body: replace(body, **{kind: (other, *others)}))

    # --- rows ---------------------------------------------------------------------------------------------------

    def groups(self, number: int) -> Groups:
        """Return the groups of batch `number`."""
        body = committed(self.store, number).body
        assert isinstance(body, BatchCommitted)
        return TrajectoryBatch.from_bytes(self.store.get(body.file.path)).groups()

    def rows(self, number: int, change: Callable[[Groups], Groups], *, counts: bool = True) -> None:
        """Replace rows of batch `number`; the entry describes the new rows correctly, unless `counts` is False."""
        groups = change(self.groups(number))
        data = TrajectoryBatch.from_groups(groups).to_bytes().to_pybytes()

        def changed(body: BatchCommitted) -> BatchCommitted:
            file = self.put(body.file.path, data)
            if not counts:
                return replace(body, file=file)
            rows = sum(len(group.trajectories) for group in groups)
            return replace(body, file=file, groups=tuple(map(told, groups)), rows=rows)

        self.batch(number, changed)

    def row(self, number: int, change: Callable[[Trajectory], Trajectory], *, ending: str = "") -> None:
        """Replace the first row of batch `number`, or the first row with this ending."""

        def changed(groups: Groups) -> Groups:
            rows = [one for group in groups for one in group.trajectories]
            first = next(one for one in rows if one.ending == ending or not ending)
            return [
                replace(group, trajectories=tuple(change(one) if one is first else one for one in group.trajectories))
                for group in groups
            ]

        self.rows(number, changed)

    def batch_with(self, ending: str) -> int:
        """Return the first batch that has a row with this ending."""
        return next(
            number
            for number in range(1, 12)
            if any(one.ending == ending for group in self.groups(number) for one in group.trajectories)
        )


def given(row: Trajectory) -> int:
    """Count the tokens of a row's prompt."""
    return list(row.loss_mask).index(True)


def put(values: Sequence[Any], place: int, value: Any) -> tuple[Any, ...]:
    """Return the values with another value at one position."""
    changed = list(values)
    changed[place] = value
    return tuple(changed)


def asked(row: Trajectory, prompt: Sequence[int]) -> Trajectory:
    """Return the row with its response and another prompt."""
    own, more = given(row), len(prompt)
    return replace(
        row,
        tokens=(*prompt, *row.tokens[own:]),
        loss_mask=(*[False] * more, *row.loss_mask[own:]),
        logprobs=(*[0.0] * more, *row.logprobs[own:]),
        versions=(*[-1] * more, *row.versions[own:]),
    )


def longer(row: Trajectory, more: int) -> Trajectory:
    """Return the row with more tokens before its last one."""
    return replace(
        row,
        tokens=(*row.tokens[:-1], *[5] * more, row.tokens[-1]),
        loss_mask=(*row.loss_mask, *[True] * more),
        logprobs=(*row.logprobs, *[-5.0] * more),
        versions=(*row.versions, *[row.versions[-1]] * more),
    )


def of_all(group: TrajectoryGroup, change: Callable[[Trajectory], Trajectory]) -> TrajectoryGroup:
    """Return the group with all its rows changed."""
    return replace(group, trajectories=tuple(map(change, group.trajectories)))
