"""Defines the options of every command of `rollflow`, and the groups of commands that the help shows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rollflow.flows.commands.cli.asking_options import add_asking, add_rejudge
from rollflow.flows.commands.cli.option_rules import check_combination, check_earlier_name, move_version
from rollflow.flows.commands.cli.parser import Commands, HelpFormat, PrintCompletion, PrintVersion
from rollflow.flows.commands.cli.shared_options import (
    add_recipe_arguments,
    add_run_argument,
    add_set_argument,
    add_settings_argument,
    add_store_argument,
    parse_positive,
)

ABOUT = (
    "Asynchronous RL post-training of language models. Commands with an optional RUN, including `stop` and `gc`, use "
    "the newest run of the store if you name none; `compare` uses the two newest runs."
)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command line.

    Raises:
        ConfigError: the command was renamed, or two of the options exclude each other.
        SystemExit: argparse has printed the help or an error message.
    """
    check_earlier_name(arguments)
    options = build_parser().parse_args(arguments)
    move_version(options)
    check_combination(options)
    return options


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser of all commands."""
    top = argparse.ArgumentParser(
        prog="rollflow",
        usage="rollflow COMMAND [OPTION...]",
        formatter_class=HelpFormat,
        epilog="`rollflow COMMAND --help` describes a command and gives an example.",
    )
    top.add_argument("--version", action=PrintVersion, nargs=0, help="print the version of rollflow")
    script = "print the completion script for bash or zsh"
    top.add_argument("--completion", action=PrintCompletion, choices=("bash", "zsh"), metavar="SHELL", help=script)
    commands = Commands(top)
    for title, add in GROUPS.items():
        commands.begin_group(title)
        add(commands)
    top.description = "\n".join([ABOUT, *commands.lines])
    return top


def _add_training(commands: Commands) -> None:
    init = commands.add(
        "init",
        "Write a recipe (the TOML file of a run) to edit; `keys` prints keys",
        "Each key of the file is a comment with its default and its meaning; remove the comment sign to set the key. "
        "The file has the keys of the default kinds; `rollflow keys` prints the keys of all kinds.",
        "rollflow init mine.toml",
    )
    init.add_argument("file", type=Path, metavar="FILE", help="file to write; it must not exist yet")

    check = commands.add(
        "check",
        "Check a recipe file, without starting a run",
        "The command makes all checks of `run` before the first token. The command starts and downloads nothing.",
        "rollflow check mine.toml --set engine.replicas=2",
    )
    add_recipe_arguments(check)
    add_settings_argument(check)
    check.add_argument("--offline", action="store_true", help="do not contact object storage, MLflow, Prefect or Ray")
    whole = check.add_mutually_exclusive_group()
    whole.add_argument("--resolved", action="store_true", help="print the whole recipe, with every default, as TOML")
    whole.add_argument("--json", action="store_true", help="print the whole recipe as JSON")

    run = commands.add(
        "run",
        "Train a policy from a recipe",
        "The command shows the run until it ends. Ctrl-C stops the run; `rollflow resume` continues it.",
        "rollflow run mine.toml --set train.learning_rate=1e-6",
    )
    add_recipe_arguments(run)
    add_settings_argument(run)
    run.add_argument("--run-id", help="id of the run; default: the recipe's name and the time of the start")
    _add_sweep(commands)
    _add_run_ends(commands)


def _add_sweep(commands: Commands) -> None:
    sweep = commands.add(
        "sweep",
        "Train a run for each combination of values and seeds",
        "The runs are trained one after the other and compared at the end.",
        "rollflow sweep mine.toml --set train.learning_rate=1e-4,3e-4 --seeds 3",
    )
    sweep.add_argument("recipe", type=Path, metavar="RECIPE", help="path of the recipe (TOML)")
    add_set_argument(sweep, "set a key of the recipe to one or more values", "KEY=VALUE[,VALUE...]")
    add_settings_argument(sweep)
    sweep.add_argument(
        "--seeds", type=parse_positive, default=1, metavar="N", help="number of seeds per combination (default: 1)"
    )
    sweep.add_argument(
        "--study", help="name of the group of runs in MLflow; give the name of a stopped study to continue it"
    )


def _add_run_ends(commands: Commands) -> None:
    resume = commands.add(
        "resume",
        "Continue a run after `stop`, a failure or its last policy version",
        "The run continues from its stored data. --set changes the run's config; the run's log records the change.",
        "rollflow resume --set versions=200",
    )
    add_run_argument(resume)
    add_set_argument(
        resume, "set a key of the config to another value; docs/recovery.md lists the keys that may change"
    )

    stop = commands.add(
        "stop",
        "End a run at its next version, or at once (`resume` continues it)",
        "The command works from any machine that reaches the run's storage.",
        "rollflow stop --now",
    )
    add_run_argument(stop)
    stop.add_argument("--now", action="store_true", help="end the run at once; unfinished work is repeated on resume")
    stop.add_argument("--no-wait", action="store_true", help="return at once, before the run has ended")


def _add_watching(commands: Commands) -> None:
    status = commands.add(
        "status",
        "Show the state of a run, or list all runs",
        "--watch shows the live view; Ctrl-C then ends the view and not the run.",
        "rollflow status --watch",
    )
    add_run_argument(status)
    status.add_argument("--watch", action="store_true", help="show the live view until the run ends")
    status.add_argument("--all", action="store_true", help="list all runs of the store, with the newest run last")
    status.add_argument("--json", action="store_true", help="print one JSON object for each run")

    log = commands.add(
        "log",
        "Print the history of a run, one line for each entry of its log",
        "--processes prints the log lines of the run's processes on this machine instead.",
        "rollflow log --processes --follow",
    )
    add_run_argument(log)
    log.add_argument("--processes", action="store_true", help="print the log lines of the run's processes")
    log.add_argument("--follow", action="store_true", help="print new lines as they appear, until Ctrl-C")
    log.add_argument("--json", action="store_true", help="print one JSON object per line")
    log.add_argument("--rates", action="store_true", help="print each question with its pass rate, as JSON lines")

    inspect = commands.add(
        "inspect",
        "Show what a run, a policy version or a trajectory was made from",
        "A trajectory (a response with its reward) has a name of the form PROMPT.ATTEMPT.SAMPLE, e.g. 12.0.3.",
        "rollflow inspect 12.0.3",
    )
    add_run_argument(inspect)
    inspect.add_argument(
        "what", nargs="?", metavar="VERSION|TRAJECTORY", help="policy version (e.g. 7) or trajectory (e.g. 12.0.3)"
    )
    inspect.add_argument("--json", action="store_true", help="print the result as one JSON object")
    inspect.add_argument(
        "--frames",
        action="store_true",
        help="replay the episode, and show what its environment renders after each turn",
    )
    _add_compare(commands)


def _add_compare(commands: Commands) -> None:
    compare = commands.add(
        "compare",
        "Compare the configs, results and costs of runs",
        "The command prints a table and writes a page with curves. Without RUN, it compares the two newest runs.",
        "rollflow compare sorting-a sorting-b --html compare.html",
    )
    compare.add_argument("runs", nargs="*", metavar="RUN", help="id of a run, or path or URI of its storage")
    add_store_argument(compare, "the runs")
    compare.add_argument(
        "--html", type=Path, metavar="FILE", help="HTML file to write; default: compare.html in the run home"
    )
    compare.add_argument("--json", action="store_true", help="print the numbers and curves as one JSON object")


def _add_proving(commands: Commands) -> None:
    audit = commands.add(
        "audit",
        "Prove from storage alone that a run kept its guarantees",
        "The exit code is 1 if the run broke a guarantee. --repair shows how a damaged log can be repaired.",
        "rollflow audit --deep",
    )
    add_run_argument(audit)
    audit.add_argument("--deep", action="store_true", help="check the whole log and every object of the run")
    audit.add_argument(
        "--anchor",
        action="append",
        default=[],
        metavar="N:SHA256",
        help="compare log entry N with a hash that you stored elsewhere; `mlflow`: compare with the hashes in MLflow",
    )
    audit.add_argument("--json", action="store_true", help="print the whole report as one JSON object")
    audit.add_argument("--repair", action="store_true", help="show how a damaged log can be repaired")
    audit.add_argument("--yes", action="store_true", help="make the repair that --repair shows")

    replay = commands.add(
        "replay",
        "Train a version again and compare its weights with the recorded ones",
        "The version is trained from the version before it, on its recorded batch. Exit code 1: the weights differ.",
        "rollflow replay --all",
    )
    add_run_argument(replay)
    replay.add_argument("version", nargs="?", metavar="VERSION", help="version to train again (default: the newest)")
    replay.add_argument("--all", action="store_true", help="train every policy version again, in order from version 1")
    replay.add_argument("--ranks", type=int, metavar="N", help="number of training processes; default: as in the run")
    replay.add_argument("--json", action="store_true", help="print one JSON object for each version")
    add_rejudge(commands)


def _add_keeping(commands: Commands) -> None:
    export = commands.add(
        "export",
        "Write a version of the policy as a Hugging Face folder",
        "transformers, TRL and `vllm serve` can load the folder.",
        "rollflow export 150 policy/",
    )
    add_run_argument(export)
    export.add_argument("version", type=int, metavar="VERSION", help="number of the policy version to export, e.g. 150")
    export.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder for the exported model; it must be new or empty"
    )

    gc = commands.add(
        "gc",
        "Delete the objects in storage that a run does not need",
        "Objects are not needed if no log entry names them, or if the run should have deleted them already.",
        "rollflow gc --dry-run",
    )
    add_run_argument(gc)
    gc.add_argument("--dry-run", action="store_true", help="list the unneeded objects, and delete nothing")
    age = "delete only objects older than this age, e.g. 30m or 2d (default: 1h)"
    gc.add_argument("--older-than", default="1h", metavar="AGE", help=age)
    gc.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _add_planning(commands: Commands) -> None:
    plan = commands.add(
        "plan",
        "Simulate a run on other hardware, or find the best split of GPUs",
        "Without --gpus, the recipe is simulated as it is. With --gpus N, simulations search for the best split of N "
        "GPUs between rollout and training, and for the best alpha.",
        "rollflow plan mine.toml --hardware rlvr-128 --gpus 128",
    )
    add_recipe_arguments(plan)
    where = plan.add_mutually_exclusive_group(required=True)
    hardware = "hardware file (TOML), or name of a hardware file that rollflow ships"
    where.add_argument("--hardware", type=Path, metavar="FILE", help=hardware)
    where.add_argument(
        "--from-run", metavar="RUN", help="use the latencies of a recorded run, and compare with that run"
    )
    plan.add_argument("--gpus", type=parse_positive, metavar="N", help="search for the best way to use N GPUs")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file as JSON")

    simulation = plan.add_argument_group("without --gpus")
    versions = "number of policy versions to simulate (default: as in the recipe)"
    simulation.add_argument("--versions", type=parse_positive, metavar="N", help=versions)
    simulation.add_argument(
        "--plot", type=Path, metavar="OUT", help="draw a timeline: OUT.png, OUT.html, or OUT (both)"
    )
    simulation.add_argument(
        "--save-hardware", type=Path, metavar="FILE", help="write the hardware of --from-run to FILE"
    )
    add_store_argument(simulation, "the run of --from-run")

    search = plan.add_argument_group("with --gpus")
    search.add_argument("--alpha", type=float, metavar="MAX", help="largest alpha (async_ratio) to try (default: 8)")
    search.add_argument("--quick", action="store_true", help="make at most 40 short simulations, not 80 longer ones")
    search.add_argument("--best", type=parse_positive, metavar="N", help="number of rows of the table (default: 6)")
    search.add_argument(
        "--max-bias",
        type=float,
        metavar="SHARE",
        help="largest relative difference of the mean lengths of trained and of all responses (default: 0.02)",
    )
    search.add_argument(
        "--max-waste", type=float, metavar="SHARE", help="largest allowed share of discarded tokens (default: 0.15)"
    )
    search.add_argument(
        "--write", type=Path, metavar="FILE", help="write the recommended recipe and FILE-hardware.toml"
    )
    search.add_argument(
        "--cost", type=Path, metavar="FILE", help="file of prices; print what a policy version and the whole run cost"
    )


def _add_serving(commands: Commands) -> None:
    serve = commands.add(
        "serve",
        "Start the servers of the Prefect and MLflow pages, until Ctrl-C",
        "With --background the command returns once the servers run, and `rollflow serve --end` ends them. "
        "Other commands with the same run home use these servers. With --sandboxes the command serves only "
        "sandboxes, see docs/sandboxes.md.",
        "rollflow serve --background",
    )
    serve.add_argument("--background", action="store_true", help="start the servers, and return when they answer")
    serve.add_argument("--end", action="store_true", help="end the servers of this run home, and keep their data")
    for name in ("prefect", "mlflow", "ray"):
        port = "port on the loopback interface; default: the port that this run home used last"
        serve.add_argument(f"--{name}-port", type=parse_positive, metavar="PORT", help=port)
    database = "Prefect's database, e.g. postgresql+asyncpg://user@host/prefect; default: the last one used, or SQLite"
    serve.add_argument("--database", metavar="URL", help=database)
    _add_sandbox_options(serve.add_argument_group("with --sandboxes"))

    deploy = commands.add(
        "deploy",
        "Add a form for each recipe of a folder to the Prefect page",
        "The command starts no run and returns at once. A form starts runs while "
        "`rollflow serve` runs. --work-pool is for a Prefect work pool of your own.",
        "rollflow deploy flows/recipes/",
    )
    deploy.add_argument("folder", type=Path, metavar="FOLDER", help="folder with recipes (*.toml)")
    pool = "print a prefect.yaml instead, which deploys the recipes and stages to this work pool"
    deploy.add_argument("--work-pool", metavar="NAME", help=pool)

    nightly = commands.add(
        "nightly",
        "Schedule nightly runs of recipes, which `serve` then starts",
        "The command registers the schedule of the file and returns at once. While `rollflow serve` "
        "runs in this run home, it trains the file's recipes at the scheduled time.",
        "rollflow nightly nightly.toml",
    )
    nightly.add_argument("file", type=Path, metavar="FILE", help="nightly file (TOML); see docs/prefect.md")


def _add_sandbox_options(serve: argparse._ArgumentGroup) -> None:
    sandboxes = (
        "serve sandboxes by SandboxFusion's and ROCK's protocols, with the limits of the recipe's [reward.sandbox]"
    )
    serve.add_argument("--sandboxes", type=Path, nargs="?", const=Path(), metavar="RECIPE", help=sandboxes)
    add_set_argument(serve, "set a key of the recipe, e.g. reward.sandbox.kind=sandlock")
    serve.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=parse_positive, metavar="PORT", help="port to listen on (default: 8080)")
    token = "file with the token of callers; created if it is missing (default: sandbox-token in the run home)"
    serve.add_argument("--token-file", type=Path, metavar="FILE", help=token)
    serve.add_argument("--no-token", action="store_true", help="let every user of this machine run programs")
    serve.add_argument(
        "--at-once", type=parse_positive, metavar="N", help="most requests that run at once (default: 8)"
    )
    queue = "number of requests that may wait; more are refused with HTTP status 503 (default: 256)"
    serve.add_argument("--queue", type=parse_positive, metavar="N", help=queue)
    live = "number of sandboxes of ROCK's protocol that may run at a time; starting another one fails (default: 64)"
    serve.add_argument("--live", type=parse_positive, metavar="N", help=live)


def _add_looking_up(commands: Commands) -> None:
    keys = commands.add(
        "keys",
        "Print every key that a recipe may have (`init` writes a recipe)",
        "Each line has a key, its default, its allowed values and its meaning. docs/configuration.md is the same list "
        "as a page. `rollflow init FILE` writes a recipe to edit.",
        "rollflow keys --hardware",
    )
    which = keys.add_mutually_exclusive_group()
    which.add_argument("--hardware", action="store_true", help="print the keys of a hardware file for `rollflow plan`")
    which.add_argument("--markdown", action="store_true", help="print all keys as the page docs/configuration.md")
    keys.add_argument("--json", action="store_true", help="print the keys as one JSON list")

    doctor = commands.add(
        "doctor",
        "Check this machine: installed packages, and services that answer",
        "The command also shows which engine a run would use. --cluster checks every node of a Ray cluster.",
        "rollflow doctor --cluster mine.toml",
    )
    doctor.add_argument("--json", action="store_true", help="print the results as JSON")
    cluster = "check the nodes of the recipe's Ray cluster, or of the cluster in --set cluster.address=HOST:PORT"
    doctor.add_argument("--cluster", type=Path, nargs="?", const=Path(), metavar="RECIPE", help=cluster)
    add_set_argument(doctor, "set a key of the recipe for --cluster to another value")
    settings = "check this settings file, and contact the services that it names"
    doctor.add_argument("--settings", type=Path, metavar="FILE", help=settings)


GROUPS = {
    "Train": _add_training,
    "Watch": _add_watching,
    "Play and evaluate": add_asking,
    "Prove": _add_proving,
    "Export and clean up": _add_keeping,
    "Plan": _add_planning,
    "Serve": _add_serving,
    "Look up": _add_looking_up,
}
