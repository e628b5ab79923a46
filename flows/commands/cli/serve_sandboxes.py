"""Implements `rollflow serve --sandboxes`, an HTTP server that runs untrusted programs in sandboxes. Clients send
programs in the protocol of SandboxFusion or of ROCK.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.config import load_recipe, override_config
from rollflow.flows.locations import run_home
from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes.config import SandboxBase
from rollflow.tasks.sandboxes.server.app import ServerBounds
from rollflow.tasks.sandboxes.server.serve import is_loopback, read_token, serve_sandboxes
from rollflow.tasks.scorers.config import CodeReward

HOST, PORT = "127.0.0.1", 8080
AT_ONCE, QUEUE, LIVE = 8, 256, 64
TOKEN_FILE = "sandbox-token"


def command(options: argparse.Namespace) -> int:
    """Serve sandboxes until Ctrl-C."""
    config = read_sandbox_config(options.sandboxes, options.set)
    host, port = options.host or HOST, PORT if options.port is None else options.port
    if options.no_token and not is_loopback(host):
        raise ConfigError(
            f"--no-token with --host {host}: without a token, other machines could run programs on this one; "
            "leave out one of the two options"
        )
    path = options.token_file or run_home() / TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    token = None if options.no_token else read_token(path)
    if config.kind == "unsafe-process":
        print("rollflow: sandboxes of kind unsafe-process protect this machine from nothing", file=sys.stderr)

    def tell(address: str) -> None:
        access = "needs no token" if token is None else f"needs the token in {path}"
        print(f"sandboxes of kind {config.kind}: {address} {access}\nCtrl-C ends them", flush=True)

    queue = QUEUE if options.queue is None else options.queue
    bounds = ServerBounds(options.at_once or AT_ONCE, options.live or LIVE, queue)
    asyncio.run(serve_sandboxes(config, host, port, token, bounds, tell))
    return OK


def read_sandbox_config(recipe: Path, overrides: list[str]) -> SandboxBase:
    """Return the section `[reward.sandbox]` of a recipe. If the path of the recipe is empty, return the default sandbox
    settings.

    Raises:
        ConfigError: the recipe configures no sandbox, or configures sandboxes of another server.
    """
    given = load_recipe(recipe, overrides) if recipe != Path() else None
    config = given or override_config({"reward": {"kind": "code"}}, overrides)
    if not isinstance(config.reward, CodeReward):
        raise ConfigError(f'reward.kind = "{config.reward.kind}" has no sandboxes; use reward.kind = "code"')
    if not isinstance(config.reward.sandbox, SandboxBase):
        raise ConfigError(
            f'reward.sandbox.kind = "{config.reward.sandbox.kind}" uses the sandboxes of another server, so there '
            "is nothing to serve here; use another kind"
        )
    return config.reward.sandbox
