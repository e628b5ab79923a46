"""Draws random log entries that may follow the state of a model, as JSON, and small changes of entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from pydantic import TypeAdapter

from rollflow.storage.log.entries import Body, Role
from rollflow.storage.records import DiscardReason
from tests.support.log_actors import QUESTIONS
from tests.support.log_model import Model

BODY: TypeAdapter[Body] = TypeAdapter(Body)
Json = dict[str, Any]


def legal(model: Model) -> Iterator[tuple[Role, int, Json]]:
    """Draw entries of every possible kind that may follow the state of the model."""
    n, claims = len(model.entries), {role: entry["n"] for role, entry in model.claims.items()}
    yield "supervisor", n, dump({"kind": "claimed"})
    if "supervisor" in claims:
        yield from (("supervisor", claims["supervisor"], body) for body in changes(model))
        for role in ("scheduler", "learner"):
            yield role, n, dump({"kind": "claimed", "under": claims["supervisor"]})
    if "scheduler" in claims:
        yield from (("scheduler", claims["scheduler"], body) for body in epochs(model))
    if "scheduler" in claims and model.latest >= 0:
        yield from (("scheduler", claims["scheduler"], body) for body in batches(model))
    for number, entry in model.waiting.items():
        for cause in ("damaged", "not-finite"):
            body = dump({"kind": "batch-voided", "number": number, "entry": entry["n"], "why": "", "cause": cause})
            yield from ((role, claims[role], body) for role in ("scheduler", "learner") if role in claims)
    if "learner" in claims:
        yield from (("learner", claims["learner"], body) for body in versions(model))
    pruned = dump({"kind": "pruned", "objects": sorted(model.may_be_pruned())})
    yield from ((role, claims[role], pruned) for role in ("learner", "supervisor") if role in claims)


def epochs(model: Model) -> Iterator[Json]:
    """Draw the next epoch of each source that skips solved questions: an epoch with all questions, one with one
    question less, and one without questions.
    """
    for source in filter(model.skips, range(model.sources)):
        earlier = model.epochs(source)
        body = {"kind": "epoch-started", "source": source, "number": len(earlier), "start": model.may_issue(source)}
        for count in (0, 1, QUESTIONS) if earlier else (0,):
            lists = {"asked": QUESTIONS - count, "skipped": list(range(count))}
            yield dump({**body, **lists, "before": earlier[-1]["n"] if earlier else None})


def batches(model: Model) -> Iterator[Json]:
    """Draw a batch for every batch number that may be formed next, from open prompts and from a new prompt of each
    source that may issue one.
    """
    may = [source for source in range(model.sources) if model.issued[source] < model.may_issue(source)]
    issued = [model.issued[source] * model.sources + source for source in may]
    keys = [*([key.prompt, key.attempt] for key in model.open), *([prompt, 0] for prompt in issued)]
    discards = [[key, "stale", 0, 5] for key in keys[:-2]]
    for number in [*model.holes, model.formed]:
        if number - model.latest <= model.alpha:
            for count in (2, 1):
                groups = [[*key, model.latest, model.latest, 7] for key in keys[-count:]]
                yield batch(number, groups, issued, discards)


def batch(number: int, groups: list[Any], issued: list[int], discards: list[Any]) -> Json:
    """Build a batch as JSON."""
    file = {"path": "trajectories/drawn", "size": 1, "sha256": "0"}
    lists = {"groups": groups, "issued": issued, "discards": discards}
    return dump({"kind": "batch-committed", "number": number, "file": file, "rows": 3 * len(groups), **lists})


def versions(model: Model) -> Iterator[Json]:
    """Draw the next version, if its batch exists."""
    weights = [{"path": "weights", "size": 1, "sha256": "0"}]
    number = model.latest + 1
    entry = model.alive[number - 1]["n"] if number - 1 in model.alive else None
    if number == 0 or entry is not None:
        body = {
            "kind": "version-published",
            "number": number,
            "batch_entry": entry,
            "weights": weights,
            "state": weights,
        }
        yield dump(body)


def changes(model: Model) -> Iterator[Json]:
    """Draw changes of the config.

    Some keys may always change. Keys on which batches depend may change only if no batch waits for training. Alpha is
    at least the staleness of the oldest waiting group.
    """
    oldest = [n - group[2] for n, entry in model.waiting.items() for group in entry["body"]["groups"]]
    others = {"versions": max(model.latest, 0), "async_ratio": max([0, *oldest]), "train": {"learning_rate": 0.5}}
    given = [{key: value} for key, value in others.items()]
    given += [] if model.waiting else [{"groups": 7}, {"group_size": model.config["group_size"] + 1}]
    for one in given:
        yield changed_config(model, one)


def changed_config(model: Model, given: Json) -> Json:
    """Return the change to another config, as JSON."""
    config = {**model.config, **given}
    listed = [[key, model.config.get(key), value] for key, value in given.items()]
    told = {"version": model.latest + 1, "config": config, "config_sha256": "", "changes": listed}
    return dump({"kind": "config-changed", **told})


def dump(body: Json) -> Json:
    """Return a body with all its fields."""
    whole: Json = BODY.dump_python(BODY.validate_python(body), mode="json")
    return whole


def changed(draw: Any, model: Model, role: Role, claim: int, body: Json) -> tuple[Role, int, Json]:
    """Draw one small change of an entry."""
    what = draw(st.sampled_from(["role", "claim", "body", "body", "body", "body"]))
    if what == "role":
        return draw(st.sampled_from(["creator", "supervisor", "scheduler", "learner"])), claim, body
    if what == "claim":
        return role, claim + draw(st.sampled_from([-1, 1])), body
    name = draw(
        st.sampled_from(sorted(body.keys() - {"kind", "file", "why", "who", "cluster", "host", "config_sha256"}))
    )
    return role, claim, body | {name: moved(draw, model, name, body[name])}


def moved(draw: Any, model: Model, name: str, value: Any) -> Any:
    """Return another value of the same type."""
    if name == "changes":
        return []
    if name == "config":
        keys = ["seed", "prompts", "policy", "versions", "async_ratio", "groups", "group_size", "engine", "store"]
        values = {"engine": {"temperature": 0.5}, "store": {**value["store"], "keep_every": 6}, "prompts": [1]}
        drawn = draw(st.integers(1, 6))
        return {**value, (key := draw(st.sampled_from(keys))): values.get(key, drawn)}
    step = draw(st.sampled_from([-3, -2, -1, 1, 2]))
    if value is None or isinstance(value, int):
        return (
            draw(st.sampled_from([None, 0, 1]))
            if value is None and name != "rows"
            else nulled(draw, name, value + step)
        )
    if not isinstance(value, list):
        return value
    how = draw(st.sampled_from(["drop", "twice", "swap", "step"])) if value else "add"
    if how == "add":
        return added(draw, model, name)
    place = draw(st.integers(0, len(value) - 1))
    one, rest = value[place], [*value[:place], *value[place + 1 :]]
    match how:
        case "drop":
            return rest
        case "twice":
            return [*value, one]
        case "swap":
            return [*rest, one]
    return [*value[:place], stepped(draw, one, step), *value[place + 1 :]]


def nulled(draw: Any, name: str, value: int) -> int | None:
    return draw(st.sampled_from([value, value, None])) if name in ("under", "batch_entry", "before") else value


def stepped(draw: Any, one: Any, step: int) -> Any:
    """Change a list's element: one of its numbers, its reason or its kind."""
    if isinstance(one, int):
        return one + step
    if isinstance(one, dict):
        return one
    if isinstance(one[-1], str):  # an element of a list of pruned objects
        return (
            [one[0] + step, one[1]] if draw(st.booleans()) else [one[0], "state" if one[1] == "weights" else "weights"]
        )
    if isinstance(one[0], list):  # a discard
        if draw(st.booleans()):
            return [stepped(draw, one[0], step), *one[1:]]
        return [one[0], draw(st.sampled_from(list(DiscardReason))).value, *one[2:]]
    place = draw(st.integers(0, min(3, len(one) - 1)))
    return [*one[:place], one[place] + step, *one[place + 1 :]]


def added(draw: Any, model: Model, name: str) -> Any:
    """Return an element for an empty list."""
    if name == "objects":
        return [[draw(st.integers(-1, model.latest + 1)), draw(st.sampled_from(["weights", "state"]))]]
    if name in ("issued", "skipped"):
        return [draw(st.integers(0, 9))]
    if name == "discards":
        return [[[draw(st.integers(0, 9)), 0], "failed", 0, 0]]
    return []
