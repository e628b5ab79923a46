"""Serves one episode: answers rollflow's requests with the user's environment. Each request is one line.

| request | answer |
|---|---|
| `open` | creates the environment (rendered if `frames` is true); its tools, `has_reward`, the fields of `durable` |
| `reset` with `row` and `seed` | `text`: the first observation or null |
| `call` with `name`, `arguments`, `key` | `text`: the result of a tool; `error`: the policy may read why it failed |
| `step` with `text` and `key` | `text`, `reward`, `ended`; `invalid` if the text is not an action |
| `reward` | `value`: the reward of the episode |
| `snapshot` | `data`: the state of the episode in Base64, and further fields for `restore` |
| `restore` with the fields of a snapshot | restores the state of the episode, after a `reset` |
| `render` | `text`: a frame as text; or its pixels, `width`, `height` and RGB `data` in Base64; or nothing |
| `close` | closes the environment |

The answer `{"error": TEXT}` means that the user's code raised an error. The answer `{"fault": TEXT}` means that the
environment must be corrected by its user; no policy can have caused this fault. The answer `{"lost": TEXT, "status":
NUMBER, "said": TEXT}` means that a part of the environment, such as an MCP server, has ended. `status` is the wait
status of the ended part, or null if the part still runs and must be ended. `said` is the last text that the part has
written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

from rollflow.tasks.environments.guest.gym import GymnasiumGuest
from rollflow.tasks.environments.guest.mcp import McpGuest
from rollflow.tasks.environments.guest.trl import TrlGuest
from rollflow.tasks.environments.guest.wire import EnvironmentFault, Fields, describe_error, pack_line

SEEDS = 2**32  # numpy accepts only seeds below this number


def import_object(path: str) -> Any:
    """Import the object that an import path "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def load_class(spec: Fields) -> dict[str, Any]:
    """Import all objects that an environment needs, from the import paths in its config."""
    if spec["folder"] not in ("", *sys.path):
        sys.path.insert(0, spec["folder"])
    if spec.get("id"):
        importlib.import_module("gymnasium")
    return {key: import_object(spec[key]) for key in ("path", "observe", "act") if spec.get(key)}


def seed_generators(seed: int) -> None:
    """Seed the global random generators, because all forked processes would otherwise draw the same random numbers."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % SEEDS)


def serve_episode(connection: socket.socket, spec: Fields) -> None:
    """Answer requests until rollflow closes the connection."""
    guest: Any = None

    def open_guest(request: Fields) -> Fields:
        nonlocal guest
        seed_generators(request["seed"])
        kinds: dict[str, Callable[[Fields, dict[str, Any]], Any]] = {
            "trl": TrlGuest,
            "gymnasium": GymnasiumGuest,
            "mcp": McpGuest,
        }
        guest = kinds[spec["kind"]]({**spec, "frames": request.get("frames", False)}, load_class(spec))
        described: Fields = guest.describe()
        return described

    for line in connection.makefile("rb"):
        try:
            request = json.loads(line)
            do = request.pop("do")
            answer = open_guest(request) if do == "open" else getattr(guest, "do_" + do)(**request)
        except EnvironmentFault as error:
            answer = {"fault": str(error)}
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, or exit
            answer = {"error": describe_error(error)}
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(pack_line(answer))
