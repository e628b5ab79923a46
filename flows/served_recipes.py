"""Lists the recipes that `rollflow serve` offers in the Prefect UI: the recipes that rollflow ships, and the recipes
that users added with `rollflow deploy FOLDER` or `rollflow nightly FILE`. The file `deployed.json` in the run home
lists the added folders and files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollflow.flows.config import load_recipe
from rollflow.flows.locations import run_home
from rollflow.flows.registration.prefect_api import SERVED, deployment_names
from rollflow.flows.services.locks import one_at_a_time
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig

SHIPPED = Path(__file__).parent / "recipes"


@dataclass(frozen=True, slots=True)
class ServedRecipe:
    """A recipe that the Prefect UI offers: its configuration, its file, and the comment at the top of the file."""

    config: RunConfig
    file: Path
    about: str


def recipes_file(place: Path) -> Path:
    """Return the path of the file that lists the deployed recipe folders and nightly files."""
    return place / "deployed.json"


def list_folders(place: Path) -> list[Path]:
    """Return the folders whose recipes are offered in the Prefect UI: rollflow's own folder, then the deployed
    folders.
    """
    return [SHIPPED, *(one for one in _read_deployed(place) if one.suffix != ".toml")]


def served_files() -> list[Path]:
    """Return the paths of the nightly files that users of this run home have added with `rollflow nightly`."""
    return [one for one in _read_deployed(run_home()) if one.suffix == ".toml"]


def deploy_recipes(place: Path, what: Path) -> None:
    """Add a folder of recipes or a nightly file to the list that `rollflow serve` serves. If the folder or file is in
    the list already, it is read again.
    """
    with one_at_a_time(place / "deploying"):
        kept = [str(one) for one in _read_deployed(place) if one != what]
        new = recipes_file(place).with_suffix(".new")
        new.write_text(json.dumps([*kept, str(what)]))
        new.replace(recipes_file(place))


def _read_deployed(place: Path) -> list[Path]:
    file = recipes_file(place)
    return [Path(one) for one in (json.loads(file.read_text()) if file.exists() else [])]


def recipes_of(folder: Path) -> list[ServedRecipe]:
    """Return the recipes of a folder, after checking each of them.

    Raises:
        ConfigError: the folder has no recipe, has an invalid recipe, or has two recipes with the same name.
    """
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ConfigError(f"the folder {str(folder)!r} contains no recipe; name a folder with *.toml files")
    found: dict[str, ServedRecipe] = {}
    for file in files:
        recipe = _read_recipe(file)
        name = recipe.config.name
        if name in deployment_names(SERVED) or name in found:
            other = "rollflow's own flows" if name in deployment_names(SERVED) else f"{found[name].file.name!r}"
            raise ConfigError(
                f"the recipes {str(file)!r} and {other} have the same name = {name!r}; give one of them another name"
            )
        found[name] = recipe
    return list(found.values())


def served_recipes(tell: Callable[[str], None]) -> list[ServedRecipe]:
    """Return every recipe that this run home offers in the Prefect UI. Of recipes with the same name, the one that was
    deployed last is returned. `tell` is called with a message for each invalid recipe.
    """
    found: dict[str, ServedRecipe] = {}
    for folder in list_folders(run_home()):
        try:
            found |= {recipe.config.name: recipe for recipe in recipes_of(folder)}
        except ConfigError as error:
            tell(str(error))
    return list(found.values())


def _read_recipe(file: Path) -> ServedRecipe:
    try:
        config = load_recipe(file, [])
    except ConfigError as error:
        raise ConfigError(f"{str(file)!r}: {error}") from None
    return ServedRecipe(config, file, _read_comment(file))


def _read_comment(file: Path) -> str:
    """Return the comment at the top of a recipe file."""
    lines = []
    for line in file.read_text(encoding="utf-8-sig").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)
