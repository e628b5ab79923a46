"""Tests which folders of modules may import which others. The source files are read, so imports inside of functions are
checked, too.

A *room* is a folder of modules, named by its path, such as "tasks/rollout". A *house* is one of the three top folders.
Their order is storage, tasks, flows: a house may import only the houses before it. `MAY` lists for each room which
rooms of its own house it may import.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSES = ("storage", "tasks", "flows")  # each top folder may import those before it
FILES = 20  # largest number of modules in a folder
LINES = 400  # largest number of lines in a module
FUNCTION_LINES = 50  # largest number of lines of a function
LEARNER_FILES = 8

# Maps a room to the other rooms of its own house that it may import.
MAY: dict[str, set[str]] = {
    "storage/objects": {"storage"},
    "storage/deltas": {"storage", "storage/objects"},
    "storage/run_records": {"storage", "storage/objects"},
    "storage/log": {"storage", "storage/objects"},
    "storage/audit": {"storage", "storage/deltas", "storage/log", "storage/objects"},
    "storage": {"storage/deltas", "storage/log", "storage/objects"},
    "tasks": set(),
    "tasks/runtime": set(),
    "tasks/objectives": {"tasks/objectives/prefixes", "tasks/runtime"},
    "tasks/objectives/prefixes": {"tasks/objectives"},
    "tasks/games": set(),
    "tasks/prompts": {"tasks/prompts/games", "tasks/runtime"},
    "tasks/prompts/games": {"tasks/games", "tasks/prompts", "tasks/runtime"},
    "tasks/scorers/code": {"tasks/runtime", "tasks/sandboxes", "tasks/scorers"},
    # A scorer's worker process decodes responses with the policy's tokenizer.
    "tasks/scorers": {
        *("tasks/policies", "tasks/runtime", "tasks/sandboxes"),
        *("tasks/scorers/code", "tasks/scorers/judge", "tasks/scorers/model", "tasks/scorers/text"),
    },
    "tasks/scorers/model": {"tasks/policies", "tasks/runtime", "tasks/scorers"},
    "tasks/scorers/text": {"tasks/scorers"},
    "tasks/scorers/spread": {"tasks/scorers"},
    "tasks/scorers/judge": {"tasks/policies", "tasks/runtime", "tasks/scorers"},
    "tasks/policies": {"tasks/policies/tokens", "tasks/prompts", "tasks/runtime"},
    "tasks/policies/tokens": set(),
    "tasks/sandboxes": {"tasks/runtime", "tasks/sandboxes/box"},
    "tasks/sandboxes/guest": {"tasks/sandboxes/box", "tasks/sandboxes/host"},
    "tasks/sandboxes/box": set(),
    "tasks/sandboxes/host": {"tasks/sandboxes/box"},
    "tasks/sandboxes/server": {"tasks/runtime", "tasks/sandboxes"},
    "tasks/engines": {"tasks/engines/vllm", "tasks/runtime", "tasks/policies"},
    "tasks/engines/vllm": {"tasks/engines", "tasks/runtime", "tasks/policies"},
    # This folder has the learner's contract. It also has the torch learner and `build_learner`, which import the
    # folders inside of it.
    "tasks/learners": {
        *("tasks/learners/checkpoint", "tasks/learners/distributed", "tasks/learners/forward"),
        *("tasks/learners/multi_rank", "tasks/learners/optimizer"),
        *("tasks/objectives", "tasks/policies", "tasks/runtime"),
    },
    "tasks/learners/checkpoint": set(),
    "tasks/learners/optimizer": {"tasks/learners", "tasks/learners/checkpoint", "tasks/objectives"},
    "tasks/learners/distributed": {"tasks/learners", "tasks/objectives/prefixes", "tasks/runtime"},
    "tasks/learners/forward": {
        *("tasks/learners", "tasks/learners/checkpoint", "tasks/learners/distributed", "tasks/learners/optimizer"),
        *("tasks/objectives", "tasks/objectives/prefixes", "tasks/policies", "tasks/runtime"),
    },
    "tasks/learners/sharding": {
        *("tasks/learners", "tasks/learners/checkpoint", "tasks/learners/distributed", "tasks/learners/forward"),
        *("tasks/learners/optimizer", "tasks/objectives", "tasks/policies", "tasks/runtime"),
    },
    "tasks/learners/multi_rank": {
        *("tasks/learners", "tasks/learners/checkpoint", "tasks/learners/distributed", "tasks/learners/sharding"),
        *("tasks/policies", "tasks/runtime"),
    },
    "tasks/environments": {
        *("tasks/engines", "tasks/environments/foreign", "tasks/environments/spread", "tasks/environments/tool_use"),
        "tasks/games",
        *("tasks/runtime", "tasks/scorers"),
    },
    "tasks/environments/foreign": {
        *("tasks/environments", "tasks/environments/guest", "tasks/runtime", "tasks/scorers"),
    },
    "tasks/environments/tool_use": {
        *("tasks/environments", "tasks/environments/foreign", "tasks/runtime", "tasks/sandboxes", "tasks/scorers"),
    },
    "tasks/environments/spread": {
        *("tasks/environments", "tasks/environments/foreign", "tasks/environments/guest", "tasks/scorers/spread"),
    },
    "tasks/environments/guest": set(),
    "tasks/statistics": set(),
    "tasks/rollout": {
        *("tasks/engines", "tasks/environments", "tasks/rollout/resuming", "tasks/runtime", "tasks/scorers"),
        "tasks/statistics",
    },
    "tasks/rollout/resuming": {"tasks/engines", "tasks/environments", "tasks/rollout"},
    "tasks/run": {  # the config of a run is composed of the configs of the other rooms
        *("tasks/engines", "tasks/environments", "tasks/learners", "tasks/objectives", "tasks/policies"),
        *("tasks/environments/foreign", "tasks/environments/tool_use", "tasks/prompts", "tasks/rollout"),
        *("tasks/runtime", "tasks/scorers"),
    },
    "tasks/run/cold_start": {
        *("tasks/engines", "tasks/environments", "tasks/environments/foreign", "tasks/environments/tool_use"),
        *("tasks/policies", "tasks/prompts", "tasks/rollout", "tasks/run", "tasks/scorers"),
    },
    "tasks/simulation": {
        *("tasks/engines", "tasks/environments", "tasks/rollout", "tasks/rollout/resuming", "tasks/run"),
        *("tasks/runtime", "tasks/scorers"),
    },
    "tasks/actors": {
        *("tasks/engines", "tasks/environments", "tasks/learners", "tasks/policies", "tasks/prompts", "tasks/rollout"),
        *("tasks/actors/environment_hosts", "tasks/actors/reward_helpers", "tasks/rollout/resuming", "tasks/run"),
        *("tasks/runtime", "tasks/sandboxes"),
        "tasks/scorers",
    },
    "tasks/actors/environment_hosts": {
        *("tasks/actors", "tasks/actors/spread", "tasks/environments", "tasks/environments/spread", "tasks/run"),
        *("tasks/runtime", "tasks/scorers/spread"),
    },
    "tasks/actors/reward_helpers": {
        *("tasks/actors", "tasks/actors/spread", "tasks/run", "tasks/runtime", "tasks/scorers"),
    },
    "tasks/actors/spread": {"tasks/actors", "tasks/run", "tasks/scorers/spread"},
    "flows/services": set(),
    "flows/ray_cluster": {"flows/services"},
    "flows/registration": set(),
    "flows/views": {"flows/registration", "flows/services", "flows/views/frames"},
    "flows/views/frames": {"flows/views"},
    "flows/views/timelines": {"flows/views"},
    "flows/tracking": {"flows/services", "flows/views"},
    "flows/keepalive": {
        *("flows", "flows/ray_cluster", "flows/registration", "flows/services", "flows/tracking", "flows/views"),
    },
    "flows/policies": {"flows", "flows/ray_cluster"},
    "flows": {
        *("flows/keepalive", "flows/policies", "flows/ray_cluster", "flows/registration", "flows/services"),
        *("flows/tracking", "flows/views"),
    },
    "flows/commands/cli": {
        *("flows", "flows/keepalive", "flows/ray_cluster", "flows/registration", "flows/services", "flows/views"),
        "flows/views/timelines",
    },
    "flows/commands/rejudge": {"flows", "flows/commands/cli"},
    "flows/commands/play": {"flows", "flows/commands/cli", "flows/policies", "flows/views"},
    "flows/commands/evaluate": {"flows", "flows/commands/cli", "flows/policies", "flows/tracking"},
    "flows/commands": {
        *("flows", "flows/commands/cli", "flows/keepalive", "flows/ray_cluster", "flows/registration"),
        "flows/services",
        *("flows/tracking", "flows/views", "flows/views/frames", "flows/views/timelines"),
    },
}
# Maps a library to the only rooms (or single modules) that may import it.
LIBRARIES: dict[str, set[str]] = {
    "ray": {"tasks/actors", "flows/ray_cluster"},
    "prefect": {
        *("flows", "flows/keepalive", "flows/registration", "flows/services", "flows/views/page"),
        "flows/tracking/status_writer",
    },
    "mlflow": {"flows/tracking/tracking", "flows/tracking/mlflow_run", "flows/tracking/registry"},
    "s3fs": {"storage/objects/s3_requests"},
    "vllm": {"tasks/engines/vllm"},
    "torch": {
        "tasks/engines",
        "tasks/learners",
        "tasks/objectives",
        "tasks/policies",
        "tasks/run/replay_diff",
        "tasks/scorers/model",
    },
    "transformers": {"tasks/engines", "tasks/learners", "tasks/policies", "tasks/scorers/model"},
    "peft": {"tasks/learners/forward/lora"},
    "datasets": {"tasks/prompts/arrow_tables"},
    "deepspeed": {"tasks/learners/sharding/deepspeed_backend"},
    "sandlock": {"tasks/sandboxes/host"},
    "fastapi": {"tasks/sandboxes/server"},
    "uvicorn": {"tasks/sandboxes/server"},
    "gymnasium": {"tasks/environments/guest"},
    "langdetect": {"tasks/scorers/text/language"},
    "pytest": {"tasks/scorers/code/pytest_guest"},
    "_pytest": {"tasks/scorers/code/pytest_case"},
    "openai": {"tasks/environments/endpoints", "tasks/scorers/judge/endpoint"},
    "aiolimiter": {"tasks/scorers/judge/endpoint"},
    "httpx": {
        *("flows/commands/play/endpoint", "flows/registration/prefect_api"),
        *("tasks/sandboxes/run_code", "tasks/sandboxes/rock", "tasks/sandboxes/rock_answers"),
    },
}
# Imports (module, target) that break the order but are allowed for now.
EXCEPTIONS: set[tuple[str, str]] = set()

Sources = Mapping[str, str]  # source text by module, such as "tasks/rollout/proxy" or "tasks/rollout/__init__"


@cache
def tree() -> Sources:
    """Return the source text of every module in the three houses."""
    files = [file for house in HOUSES for file in (ROOT / house).rglob("*.py")]
    return {file.relative_to(ROOT).with_suffix("").as_posix(): file.read_text() for file in files}


@cache
def names(source: str) -> frozenset[str]:
    """Return the dotted names that a source text imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"an import says the whole name: {ast.unparse(node)}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def imports(module: str, sources: Sources) -> set[str]:
    """Return what a module imports: rollflow's modules by their paths, and libraries by their top-level names."""
    return {located(name, sources) for name in names(sources[module])} - {module}


def located(name: str, sources: Sources) -> str:
    """Return the module or library that defines a dotted name."""
    library, _, inner = name.partition(".")
    if library != "rollflow":
        return library
    path = inner.replace(".", "/")
    outer = path.rpartition("/")[0]
    return next(known for known in (path, f"{path}/__init__", outer, f"{outer}/__init__") if known in sources)


def room(module: str) -> str:
    """Return the folder of a module."""
    return module.rpartition("/")[0]


def wrong(sources: Sources) -> list[str]:
    """Return a sentence for each import that is not allowed."""
    found = []
    for module in sorted(sources):
        home = room(module)
        for target in sorted(imports(module, sources)):
            if target in LIBRARIES and not any(covers(one, home) or one == module for one in LIBRARIES[target]):
                found.append(f"{module} imports {target}, which is for {sorted(LIBRARIES[target])}")
            if target in sources and not may(home, room(target)) and (module, target) not in EXCEPTIONS:
                found.append(f"{module} imports {target}: an arrow from {home} to {room(target)}")
    return found


def may(room: str, other: str) -> bool:
    """Return whether modules of one room may import modules of another."""
    house, others = (HOUSES.index(one.partition("/")[0]) for one in (room, other))
    return others < house or room == other or (others == house and any(covers(one, other, room) for one in MAY[room]))


def covers(entry: str, other: str, home: str = "") -> bool:
    """Return whether an entry of a table covers the room `other`. An entry covers the room that it names. If this room
    is not a house, the entry also covers the rooms inside of it, unless `home` is the room itself or is inside of it.
    """
    return other == entry or ("/" in entry and other.startswith(f"{entry}/") and not f"{home}/".startswith(f"{entry}/"))


def circle(sources: Sources) -> list[str]:
    """Return modules that import each other in a circle; return an empty list if there is no circle."""
    try:
        TopologicalSorter({module: imports(module, sources) for module in sources}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_declares_its_imports() -> None:
    rooms = {room(module) for module in tree()}
    assert rooms == set(MAY)


def test_no_import_breaks_the_layer_order() -> None:
    assert wrong(tree()) == []


def test_imports_have_no_cycle() -> None:
    assert circle(tree()) == []


def test_folders_and_modules_stay_below_their_size_limits() -> None:
    counts = Counter(room(module) for module in tree() if not module.endswith("/__init__"))
    assert not {one: count for one, count in counts.items() if count > FILES}
    lengths = {module: len(source.splitlines()) for module, source in tree().items()}
    assert not {one: length for one, length in lengths.items() if length > LINES}


def test_functions_stay_below_their_size_limit() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        f"{module}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, source in tree().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds)
    }
    assert not {one: length for one, length in found.items() if length > FUNCTION_LINES}


def test_folder_of_learners_has_few_files_of_its_own() -> None:
    own = [module for module in tree() if room(module) == "tasks/learners"]
    assert len(own) <= LEARNER_FILES, own


PLANTED = [
    ("storage/records", "from rollflow.tasks.run.config import RunConfig"),
    ("storage/log/run_log", "from rollflow.flows import locations"),
    ("storage/log/run_log", "from rollflow.storage.run_records.recoveries import RecoveryLog"),
    ("tasks/run/config", "import rollflow.flows.config"),
    ("tasks/runtime/clock", "import ray"),
    ("tasks/rollout/proxy", "from rollflow.tasks.actors.engine_client import RayEngine"),
    ("tasks/rollout/scheduler", "def late() -> None:\n    import ray.util"),
    ("tasks/rollout/scheduler", "import torch"),
    ("tasks/objectives/surrogates", "from rollflow.tasks.rollout import limits"),
    ("tasks/learners/torch_learner", "from rollflow.tasks.engines import build_engine"),
    ("tasks/learners/torch_learner", "import peft"),
    ("tasks/learners/base", "from rollflow.tasks.learners.sharding.backend import ShardingBackend"),
    ("tasks/learners/forward/critic", "from rollflow.tasks.learners.sharding.backend import ShardingBackend"),
    ("tasks/learners/distributed/ranks", "import peft"),
    ("tasks/runtime/node", "from rollflow.tasks.run.config import RunConfig"),
    ("tasks/rollout/limits", "from rollflow.tasks.run.config import RunConfig"),
    ("tasks/actors/learner", "from prefect import flow"),
    ("flows/ray_cluster/cluster", "from rollflow.flows.keepalive import actors"),
    ("flows/services/process", "from rollflow.flows.locations import attach_run"),
    ("flows/views/console", "from rollflow.flows.commands import run"),
    ("flows/keepalive/actors", "from rollflow.flows.commands.run import run"),
    ("flows/train", "import rollflow.flows.commands.cli"),
    ("flows/views/summary", "import mlflow"),
    ("storage/objects/local", "from s3fs import S3FileSystem"),
]


@pytest.mark.parametrize(("module", "line"), PLANTED)
def test_planted_upward_import_is_found(module: str, line: str) -> None:
    (found,) = wrong({**tree(), module: f"{tree()[module]}\n{line}\n"})
    assert found.startswith(f"{module} imports ")


def test_planted_import_cycle_is_found() -> None:
    line = "def late() -> None:\n    from rollflow.tasks.rollout.scheduler import RolloutScheduler\n"
    found = circle({**tree(), "tasks/rollout/limits": f"{tree()['tasks/rollout/limits']}\n{line}"})
    assert {"tasks/rollout/limits", "tasks/rollout/scheduler"} <= set(found)
