"""Makes relative paths absolute: paths in a recipe are relative to the recipe's folder, paths in `--set` to the working
folder.

| key | what counts as a path |
|---|---|
| `prompts.path` of kind "jsonl" | every value |
| `policy.path` | an existing folder, or a name that cannot be a hub name; anything else is a hub name |
| `store.uri` | a value without a scheme |
| `tracking.uri` | a value without a scheme (except "databricks"), `file:` and `sqlite:///` |

Import paths of user-defined parts name modules, not files, and `options` are passed on unchanged. A run records the
absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError

Place = tuple[str, dict[str, Any], str]  # dotted key, the table that contains the key, the key's last part
Anchor = Callable[[str, Path], str]


def recipe_folder(recipe: Path) -> Path:
    """Return the folder that a recipe's paths are relative to: the recipe's folder, or the working folder for a recipe
    from a pipe.
    """
    return recipe.parent.resolve() if recipe.is_file() else Path.cwd()


def path_values(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that may be paths, by key."""
    return {key: table[last] for (key, table, last), _ in _find_paths(tree)}


def anchor_paths(tree: Mapping[str, Any], folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Make a tree's relative paths absolute, from `folder`; values that are already `known` stay unchanged.

    Raises:
        ConfigError: `policy.path` is no folder relative to `folder`, but is one relative to the working folder.
    """
    for (key, table, last), anchor in _find_paths(tree):
        if (known or {}).get(key) != table[last]:
            table[last] = anchor(table[last], folder)


def _find_paths(tree: Mapping[str, Any]) -> Iterator[tuple[Place, Anchor]]:
    prompts = tree.get("prompts")
    candidates: list[tuple[str, Any, str, Anchor]] = [
        ("policy", tree.get("policy"), "path", _anchor_policy),
        ("store", tree.get("store"), "uri", _anchor_store),
        ("tracking", tree.get("tracking"), "uri", _anchor_tracking),
    ]
    for position, source in enumerate(prompts if isinstance(prompts, list) else ()):
        if isinstance(source, dict) and source.get("kind") == "jsonl":
            candidates.append((f"prompts.{position}", source, "path", _anchor_file))
    for place, table, last, anchor in candidates:
        if isinstance(table, dict) and isinstance(table.get(last), str) and table[last]:
            yield (f"{place}.{last}", table, last), anchor


def _anchor_file(path: str, folder: Path) -> str:
    try:
        return str(folder / Path(path).expanduser())
    except RuntimeError:  # the path names an unknown user's home, which opening the path will report
        return path


def _anchor_policy(path: str, folder: Path) -> str:
    there = _anchor_file(path, folder)
    could_be_a_hub_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    if not could_be_a_hub_name or Path(there).is_dir():
        return there
    if Path(path).is_dir():
        cure = f"write the folder's absolute path, or give --set policy.path={path}"
        where = f"the folder is not beside the recipe, in {folder}, but in the working folder"
        raise ConfigError(f"policy.path = {path!r}: {where}; {cure}")
    return path


def _anchor_store(uri: str, folder: Path) -> str:
    return uri if "://" in uri else _anchor_file(uri, folder)


def _anchor_tracking(uri: str, folder: Path) -> str:
    # with four slashes the path is absolute; with a colon it names a database in memory
    if match := re.fullmatch(r"(sqlite:///)([^/:].*)", uri):
        return match[1] + _anchor_file(match[2], folder)
    if match := re.fullmatch(r"file:(?://)?([^/].*)", uri):
        return f"file://{_anchor_file(match[1], folder)}"
    return uri if ":" in uri or uri == "databricks" else _anchor_file(uri, folder)
