"""Makes relative paths in a config absolute: paths in a recipe (a run's config file) are relative to the recipe's
folder, and paths in `--set` to the working folder.

    | key | what counts as a path |
    |---|---|
    | `prompts.path` of kind "jsonl"; `path`, `held_out_path` and `evaluation_sets.NAME.path` of kind "file" | every
      value; with format = "hub", only a value with the suffix of a table file |
    | `policy.path`, `path` of a reward model | an existing folder, or a name that cannot be a hub name; anything else
      is a hub name |
    | `policy.from_run.run` | a value with a slash and without a scheme; any other value is a run id or a URI |
    | `store.uri` | a value without a scheme |
    | `tracking.uri` | a value without a scheme (except "databricks"), `file:` and `sqlite:///` |

Import paths of user-defined parts name modules, not files, and `options` are passed on unchanged. A run records the
absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.config import SUFFIXES

# a path value: the dotted name of its config key, the table that contains the key, and the last part of the name
Place = tuple[str, dict[str, Any], str]
Anchor = Callable[[str, Path], str]


def recipe_folder(recipe: Path) -> Path:
    """Return the folder to which the paths in a recipe (a run's config file) are relative: the recipe's folder, or the
    working folder if the recipe comes from a pipe.
    """
    return recipe.parent.resolve() if recipe.is_file() else Path.cwd()


def path_values(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the config values that may be paths, by dotted key."""
    return {key: table[last] for (key, table, last), _ in _find_paths(tree)}


def anchor_paths(tree: Mapping[str, Any], folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Resolve the relative paths in a config against `folder`, so that they are absolute. Paths that `known` contains
    under the same key are not changed.

    Raises:
        ConfigError: the path `policy.path` exists in the working folder, but not in `folder`.
    """
    for (key, table, last), anchor in _find_paths(tree):
        if (known or {}).get(key) != table[last]:
            table[last] = anchor(table[last], folder)


def _find_paths(tree: Mapping[str, Any]) -> Iterator[tuple[Place, Anchor]]:
    prompts = tree.get("prompts")
    candidates: list[tuple[str, Any, str, Anchor]] = [
        ("policy", tree.get("policy"), "path", _anchor_policy),
        ("policy.from_run", _read_table(tree.get("policy"), "from_run"), "run", _anchor_run),
        ("store", tree.get("store"), "uri", _anchor_store),
        ("tracking", tree.get("tracking"), "uri", _anchor_tracking),
    ]
    candidates += [
        (section, table, "path", partial(_anchor_policy, key=f"{section}.path"))
        for section, table in _list_scorers(tree)
        if isinstance(table, dict) and table.get("kind") == "model"
    ]
    for position, source in enumerate(prompts if isinstance(prompts, list) else ()):
        if isinstance(source, dict) and source.get("kind") in ("jsonl", "file"):
            anchor: Anchor = _anchor_file if source.get("format") != "hub" else _anchor_suffixed
            candidates += [(f"prompts.{position}", source, key, anchor) for key in ("path", "held_out_path")]
            sets = source.get("evaluation_sets")
            for name, one in (sets if isinstance(sets, dict) else {}).items():
                candidates.append((f"prompts.{position}.evaluation_sets.{name}", one, "path", anchor))
    for place, table, last, anchor in candidates:
        if isinstance(table, dict) and isinstance(table.get(last), str) and table[last]:
            yield (f"{place}.{last}", table, last), anchor


def _list_scorers(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List the config sections of reward scorers with their names."""
    named = tree.get("rewards")
    further = named.items() if isinstance(named, Mapping) else ()
    return [("reward", tree.get("reward")), *((f"rewards.{name}", table) for name, table in further)]


def _read_table(tree: Any, key: str) -> Any:
    return tree.get(key) if isinstance(tree, Mapping) else None


def _anchor_run(run: str, folder: Path) -> str:
    return _anchor_file(run, folder) if "/" in run and "://" not in run else run


def _anchor_file(path: str, folder: Path) -> str:
    try:
        return str(folder / Path(path).expanduser())
    except RuntimeError:  # `~user` names an unknown user; opening the path reports the error
        return path


def _anchor_suffixed(path: str, folder: Path) -> str:
    """Make a data set's path absolute if it has the suffix of a table file; otherwise it is the name of a data set."""
    return _anchor_file(path, folder) if Path(path).suffix.lower() in SUFFIXES else path


def _anchor_policy(path: str, folder: Path, key: str = "policy.path") -> str:
    there = _anchor_file(path, folder)
    could_be_a_hub_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    if not could_be_a_hub_name or Path(there).is_dir():
        return there
    if Path(path).is_dir():
        cure = f"write the folder's absolute path, or give --set {key}={path}"
        where = f"the folder is not beside the recipe, in {folder}, but in the working folder"
        raise ConfigError(f"{key} = {path!r}: {where}; {cure}")
    return path


def _anchor_store(uri: str, folder: Path) -> str:
    return uri if "://" in uri else _anchor_file(uri, folder)


def _anchor_tracking(uri: str, folder: Path) -> str:
    # A database URI with four slashes has an absolute path, and one with a colon names a database in memory.
    if match := re.fullmatch(r"(sqlite:///)([^/:].*)", uri):
        return match[1] + _anchor_file(match[2], folder)
    if match := re.fullmatch(r"file:(?://)?([^/].*)", uri):
        return f"file://{_anchor_file(match[1], folder)}"
    return uri if ":" in uri or uri == "databricks" else _anchor_file(uri, folder)
