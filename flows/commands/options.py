"""Defines every verb of the command line and its options. Each verb is implemented in the module of the same name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    top = argparse.ArgumentParser(prog="rollflow", description="asynchronous RL post-training of language models")
    top.add_argument("--version", action=_Version, help="print the version of rollflow and exit")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    _recipe_commands(commands)
    _looking_commands(commands)
    _proving_commands(commands)
    _storage_commands(commands)
    _simulation_commands(commands)
    _helping_commands(commands)
    _serving_commands(commands)
    return top


def _recipe_commands(commands: Any) -> None:
    """Add the verbs that take a recipe, and `resume`."""
    run = commands.add_parser("run", help="train a policy from a recipe")
    run.add_argument("recipe", type=Path)
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. train.learning_rate=1e-4")
    _settings_argument(run)
    run.add_argument("--run-id", help="default: the recipe's name and the time")
    run.set_defaults(verb="run")

    sweep = commands.add_parser("sweep", help="start a run for each of several values and seeds, and compare them")
    sweep.add_argument("recipe", type=Path)
    values = "several values: train.learning_rate=1e-4,3e-4"
    sweep.add_argument("--set", action="append", default=[], metavar="KEY=VALUE[,VALUE...]", help=values)
    _settings_argument(sweep)
    sweep.add_argument("--seeds", type=_positive, default=1, metavar="N", help="runs of each value (default: 1)")
    sweep.add_argument("--study", help="name of the whole study; the name of a stopped study continues it")
    sweep.set_defaults(verb="sweep")

    resume = commands.add_parser("resume", help="continue a run that was stopped")
    _run_argument(resume, required=True)
    changed = "continue with another value of a key, e.g. versions=20; docs/recovery.md lists the keys that may change"
    resume.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=changed)
    resume.set_defaults(verb="resume")

    check = commands.add_parser("check", help="validate a recipe")
    check.add_argument("recipe", type=Path)
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    _settings_argument(check)
    check.add_argument("--offline", action="store_true", help="contact no service: no store, MLflow, Prefect or Ray")
    whole = check.add_mutually_exclusive_group()
    whole.add_argument("--resolved", action="store_true", help="print the whole recipe, with every default, as TOML")
    whole.add_argument("--json", action="store_true", help="the same as one JSON object")
    check.set_defaults(verb="check")


def _helping_commands(commands: Any) -> None:
    """Add the verbs that help to write a recipe and to find what is missing."""
    keys = commands.add_parser("keys", help="print every key of a recipe, with its default and meaning")
    which = keys.add_mutually_exclusive_group()
    which.add_argument(
        "--hardware", action="store_true", help="print the keys of a hardware file for `simulate` instead"
    )
    which.add_argument(
        "--markdown", action="store_true", help="print the keys of both, as the page docs/configuration.md"
    )
    keys.add_argument("--json", action="store_true", help="one JSON list")
    keys.set_defaults(verb="keys")

    init = commands.add_parser("init", help="write a recipe to start from, with every key in a comment")
    init.add_argument("file", type=Path, help="a new file, e.g. mine.toml")
    init.set_defaults(verb="init")

    completion = commands.add_parser(
        "completion", help="print the script for a shell's completion of commands and options"
    )
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(verb="completion")

    doctor = commands.add_parser(
        "doctor", help="show what is installed, which services answer, and which engine a run would use"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON list")
    doctor.add_argument(
        "--cluster",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="RECIPE",
        help="ask every node of the recipe's Ray cluster instead, or of --set cluster.address=HOST:PORT",
    )
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with --cluster")
    doctor.add_argument(
        "--settings", type=Path, metavar="FILE", help="check this settings file, and contact the places that it names"
    )
    doctor.set_defaults(verb="doctor")


def _settings_argument(command: argparse.ArgumentParser) -> None:
    given = "variables, store, cluster and tracking of an installation; see docs/cluster.md"
    command.add_argument("--settings", type=Path, metavar="FILE", help=given)


class _Version(argparse.Action):
    """Prints the version, which is looked up only on request."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rollflow {version('rollflow')}")
        parser.exit()


def _looking_commands(commands: Any) -> None:
    """Add the verbs that observe or end runs."""
    listed = commands.add_parser("list", help="list the runs of a store, the newest last")
    listed.add_argument("--store", help="default: ROLLFLOW_STORE, or one in the run home")
    listed.add_argument("--json", action="store_true", help="one JSON object a line")
    listed.set_defaults(verb="list")

    status = commands.add_parser("status", help="show the status of a run (default: the newest)")
    _run_argument(status, required=False)
    status.add_argument("--json", action="store_true", help="as one JSON object")
    status.set_defaults(verb="status")

    for verb, when in (("stop", "at its next version"), ("cancel", "at once")):
        ended = commands.add_parser(verb, help=f"end a run {when}, wherever it runs; it can be resumed")
        _run_argument(ended, required=True)
        ended.add_argument("--no-wait", action="store_true", help="do not wait until it has ended")
        ended.set_defaults(verb=verb)

    logs = commands.add_parser("logs", help="print the logs of a run's flows on this machine (default: the newest run)")
    _run_argument(logs, required=False)
    logs.add_argument("--follow", action="store_true", help="also print new lines, until the run ends or Ctrl-C")
    logs.add_argument("--json", action="store_true", help="one JSON object a line; see ROLLFLOW_LOG_FORMAT")
    logs.set_defaults(verb="logs")

    top = commands.add_parser(
        "top", help="watch a run (default: the newest) until it ends; Ctrl-C ends only the watching"
    )
    _run_argument(top, required=False)
    top.set_defaults(verb="top")


def _serving_commands(commands: Any) -> None:
    """Add the verbs that run servers."""
    serve = commands.add_parser("serve", help="serve the deployments, the Prefect UI and MLflow until Ctrl-C")
    up = commands.add_parser("up", help="`serve` in the background, until `down`; commands in the same home use it")
    for command in (serve, up):
        for name in ("prefect", "mlflow", "ray"):
            wanted = "a port on loopback; default: the last one of this home"
            command.add_argument(f"--{name}-port", type=_positive, metavar="PORT", help=wanted)
        database = (
            "for Prefect, e.g. postgresql+asyncpg://user@host/prefect; default: the last one of this home, or SQLite"
        )
        command.add_argument("--database", metavar="URL", help=database)
    serve.set_defaults(verb="serve")
    up.set_defaults(verb="up")
    down = commands.add_parser("down", help="end the servers that `up` started in this home; their data is kept")
    down.set_defaults(verb="down")

    deploy = commands.add_parser("deploy", help="make each recipe of a folder a deployment in the Prefect UI")
    deploy.add_argument("folder", type=Path)
    pool = "instead, print a prefect.yaml that deploys them and the stages to this work pool"
    deploy.add_argument("--work-pool", metavar="NAME", help=pool)
    deploy.set_defaults(verb="deploy")

    nightly = commands.add_parser("nightly", help="train the recipes of a nightly file every night")
    nightly.add_argument("file", type=Path)
    nightly.set_defaults(verb="nightly")


def _proving_commands(commands: Any) -> None:
    """Add the verbs that verify a run from its storage alone."""
    audit = commands.add_parser("audit", help="prove a run's invariants from its storage alone")
    _run_argument(audit, required=True)
    audit.add_argument("--deep", action="store_true", help="check from the first entry on, and check every object")
    audit.add_argument(
        "--anchor",
        action="append",
        default=[],
        metavar="N:SHA256",
        help="compare entry N with a hash that was kept elsewhere; `mlflow` takes the hashes from MLflow; repeatable",
    )
    audit.add_argument("--json", action="store_true", help="the whole report as one JSON object")
    audit.set_defaults(verb="audit")

    replay = commands.add_parser("replay", help="retrain a version from its parent and batch, and compare the weights")
    _run_argument(replay, required=True)
    which = replay.add_mutually_exclusive_group()
    which.add_argument("version", nargs="?", type=int, help="default: the newest")
    which.add_argument("--all", action="store_true", help="retrain every version, from the first")
    replay.add_argument("--ranks", type=int, help="number of training processes; default: as many as the run has")
    replay.add_argument("--json", action="store_true", help="one JSON object a version")
    replay.set_defaults(verb="replay")


def _storage_commands(commands: Any) -> None:
    """Add the verbs that need only a run's storage."""
    inspect = commands.add_parser("inspect", help="show the lineage of a run, a version or a trajectory")
    _run_argument(inspect, required=True)
    inspect.add_argument("what", nargs="?", help="a version (7) or a trajectory (PROMPT.ATTEMPT.SAMPLE: 12.0.3)")
    inspect.add_argument("--json", action="store_true", help="as one JSON object")
    inspect.set_defaults(verb="inspect")

    compare = commands.add_parser("compare", help="compare the configs, results and costs of runs")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run ids, or paths or URIs of runs' storage")
    compare.add_argument(
        "--store", help="the store that holds the runs; default: ROLLFLOW_STORE, or one in the run home"
    )
    compare.add_argument("--html", type=Path, metavar="FILE", help="the page; default: compare.html in the run home")
    compare.add_argument("--json", action="store_true", help="print the figures and curves as one JSON object")
    compare.set_defaults(verb="compare")

    log = commands.add_parser("log", help="print the history of a run, one line for each entry of its log")
    _run_argument(log, required=True)
    log.add_argument("--follow", action="store_true", help="also print new entries, until Ctrl-C")
    log.add_argument("--json", action="store_true", help="print the entries as JSON, one a line")
    log.set_defaults(verb="log")

    repair = commands.add_parser("repair", help="show how a damaged log can be repaired, or repair it")
    _run_argument(repair, required=True)
    repair.add_argument("--yes", action="store_true", help="make the repair")
    repair.set_defaults(verb="repair")

    export = commands.add_parser("export", help="write a version as a Hugging Face folder")
    _run_argument(export, required=True)
    export.add_argument("version", type=int)
    export.add_argument("folder", type=Path, help="a new folder")
    export.set_defaults(verb="export")

    gc = commands.add_parser("gc", help="delete objects of a run that its log does not need")
    _run_argument(gc, required=True)
    gc.add_argument("--dry-run", action="store_true", help="only list the objects")
    gc.add_argument("--older-than", default="1h", metavar="AGE", help="e.g. 30m, 1h (the default), 2d")
    gc.add_argument("--json", action="store_true", help="as one JSON object")
    gc.set_defaults(verb="gc")


def _simulation_commands(commands: Any) -> None:
    """Add the verbs that run on a virtual clock."""
    simulate = commands.add_parser("simulate", help="simulate a recipe on other hardware, in virtual time")
    simulate.add_argument("recipe", type=Path)
    simulate.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    where = simulate.add_mutually_exclusive_group(required=True)
    where.add_argument("--hardware", type=Path, metavar="FILE", help="a TOML file, or the name of a shipped one")
    where.add_argument(
        "--from-run", metavar="RUN", help="take the latencies of a recorded run, and compare the prediction with it"
    )
    simulate.add_argument("--store", help="the store that holds RUN; default: ROLLFLOW_STORE, or one in the run home")
    simulate.add_argument("--versions", type=_positive, metavar="N", help="default: the recipe's")
    simulate.add_argument("--plot", type=Path, metavar="OUT", help="draw the timeline: OUT.png, OUT.html; OUT: both")
    simulate.add_argument(
        "--save-hardware", type=Path, metavar="FILE", help="with --from-run: write the fitted hardware"
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    simulate.set_defaults(verb="simulate")
    _plan_command(commands)


def _plan_command(commands: Any) -> None:
    plan = commands.add_parser(
        "plan", help="find the best GPU split between rollout and training, and alpha, by simulation"
    )
    plan.add_argument("recipe", type=Path)
    plan.add_argument("--gpus", type=_positive, required=True, metavar="N", help="number of GPUs to divide")
    plan.add_argument("--hardware", type=Path, required=True, metavar="FILE", help="as for `simulate`")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    plan.add_argument("--alpha", type=float, default=8.0, metavar="MAX", help="largest alpha tried (default: 8)")
    plan.add_argument("--quick", action="store_true", help="at most 40 shorter simulations instead of 80")
    plan.add_argument("--best", type=_positive, default=6, metavar="N", help="rows of the table (default: 6)")
    plan.add_argument(
        "--max-bias", type=float, default=0.02, metavar="SHARE", help="limit, of the mean length (default: 0.02)"
    )
    plan.add_argument(
        "--max-waste", type=float, default=0.15, metavar="SHARE", help="limit, of all tokens (default: 0.15)"
    )
    plan.add_argument("--write", type=Path, metavar="FILE", help="write the recipe, and FILE-hardware.toml beside it")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    plan.add_argument("--cost", type=Path, metavar="FILE", help="prices an hour: print what a version and the run cost")
    plan.set_defaults(verb="plan")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number above 0")
    return number


def _run_argument(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument("run", nargs=None if required else "?", help="a run id, or the path or URI of a run's storage")
    command.add_argument(
        "--store", help="the store that holds the run; default: ROLLFLOW_STORE, or one in the run home"
    )
