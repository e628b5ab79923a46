"""Maps old names of config keys and values to their present names, and lists removed keys.

    a stored config    -->  `Renames.apply`     read as if it had been recorded with today's names
    a new recipe       -->  `Renames.refusals`  refused, with today's name

Guarantees:
- A stored config keeps its old names, and so its hash; a config change is recorded with the old names, too
  (`Renames.undo`).
- Only the readers of stored configs translate names. No new recipe, `--set` option, parameter form or file may use an
  old name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Renames:
    """A table of renamed config keys and values.

    `keys` maps the old dotted name of a key to its present name in the same section.

    `values` maps the present name of a key to a map from its old values to its present values. `removed` contains keys
    that no longer have an effect. `kinds` maps a section and its kind, such as ("environment", "trl"), to the renamed
    keys of this kind.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str | bool, str]] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    kinds: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)

    def apply(self, tree: Tree, prefix: str = "") -> dict[str, Any]:
        """Return a stored config with present names of keys and values.

        If a section has both the old and the present name of a key, the old name stays.
        """
        renamed: dict[str, Any] = {}
        keys = self._list_keys(tree, prefix)
        for name, value in tree.items():
            if f"{prefix}{name}" in self.removed:
                continue
            today = keys.get(f"{prefix}{name}", name)
            name = today if today not in tree else name
            key = f"{prefix}{name}"
            renamed[name] = self.apply(value, f"{key}.") if isinstance(value, Mapping) else self._value(key, value)
        return renamed

    def undo(self, tree: Tree, stored: Tree, prefix: str = "") -> dict[str, Any]:
        """Return a config with the old names of keys that the stored config `stored` uses."""
        earlier = {
            today: name
            for key, today in self._list_keys(tree, prefix).items()
            for name in [_name_in(key, prefix)]
            if name in stored
        }
        undone: dict[str, Any] = {}
        for name, value in tree.items():
            name = earlier.get(name, name)
            below = stored.get(name)
            if isinstance(value, Mapping):
                value = self.undo(value, below if isinstance(below, Mapping) else {}, f"{prefix}{name}.")
            undone[name] = value
        return undone

    def change(self, key: str, value: object) -> tuple[str, object]:
        """Return the present names of a dotted config key and its value, which come from a log entry.

        A removed key is returned unchanged.
        """
        if key in self.removed:
            return key, value
        names, below = key.split("."), value
        for name in reversed(names):
            below = {name: below}
        today, rest = list[str](), self.apply(below) if isinstance(below, Mapping) else value
        for _ in names:
            assert isinstance(rest, Mapping), "each part of the key has one level"
            ((name, rest),) = rest.items()
            today.append(name)
        return ".".join(today), rest

    def refusals(self, tree: object, prefix: str = "") -> Iterator[tuple[str, object, str]]:
        """Yield each key of a new config that has an old name or value, with the value and advice for the user."""
        if not isinstance(tree, Mapping):
            return
        keys = self._list_keys(tree, prefix)
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in self.removed:
                yield key, value, "the key was removed; leave it out"
            elif today := keys.get(key):
                yield key, value, f"the key was renamed to {prefix}{today}; write that name"
            elif (now := self._value(key, value)) != value:
                yield key, value, f'the value was renamed to "{now}"; write that value'
            yield from self.refusals(value, f"{key}.")

    def _list_keys(self, tree: Tree, prefix: str) -> Mapping[str, str]:
        """Map the dotted old names of keys to their present names, including keys that only the section's kind has."""
        own = self.kinds.get((prefix.rstrip("."), str(tree.get("kind"))))
        return {**self.keys, **{f"{prefix}{name}": today for name, today in own.items()}} if own else self.keys

    def _value(self, key: str, value: Any) -> Any:
        return self.values.get(key, {}).get(value, value) if isinstance(value, str | bool) else value


def _name_in(key: str, prefix: str) -> str:
    """Return the last part of a dotted config key if the key is directly below `prefix`, else ""."""
    section, dot, name = key.rpartition(".")
    return name if section + dot == prefix else ""


FOREIGN = {
    "turn_tokens": "max_turn_tokens",
    "step_seconds": "turn_seconds",
    "reset_seconds": "setup_seconds",
    "python": "interpreter",
    "processes": "at_once",
}
RECIPE = Renames(
    keys={
        "rollout.depth": "max_inflight_groups",
        "rollout.ahead": "max_batches_ahead",
        "rollout.extra_groups": "redundant_groups",
        "rollout.extra_responses": "redundant_responses",
        "rollout.tail_after": "max_preemptions",
        "rollout.at_bound": "on_stale",
        "rollout.order": "batch_order",
        "rollout.staleness": "staleness_from",
        "rollout.filter.most": "max_consecutive",
        "engine.slots": "max_concurrent_requests",
        "engine.in_flight": "on_weight_update",
        "engine.slowing": "batch_slowdown",
        "engine.reading": "kv_read_cost",
        "engine.grain": "tokens_per_tick",
        "reward.format.price": "penalty",
        "train.learner": "kind",
        "train.spread": "multi_node",
        "train.share_prompts": "share_prefixes",
    },
    values={
        "train.not_finite": {"next": "skip"},
        "rollout.routing": {"group": "prefix"},
        "train.share_prefixes": {True: "prompts", False: "none"},
    },
    removed=frozenset({"rollout.mode"}),
    kinds={
        **{("environment", kind): FOREIGN for kind in ("trl", "gymnasium")},
        **{("environment", kind): {"turns": "max_turns"} for kind in ("frozen-lake", "sokoban")},
    },
)
HARDWARE = Renames(
    keys={
        "engines.slots": "max_concurrent_requests",
        "engines.slowing": "batch_slowdown",
        "engines.reading": "kv_read_cost",
        "responses.grain": "tokens_per_tick",
    }
)
