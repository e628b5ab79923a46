"""The command line. Exit codes: 0, 1 (ran and failed), 2 (a person must change something).

Importing this module loads no torch, Ray, vLLM, Prefect or MLflow: each command imports what it needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollflow.storage.errors import ConfigError, Missing, RollflowError, Unreachable

if TYPE_CHECKING:
    from rollflow.flows.services.session import Session
    from rollflow.flows.views.status import RunStatus
    from rollflow.tasks.run_context import RunContext

OK, FAILED, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors become one sentence on standard error."""
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except ConfigError as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return BAD_INPUT
    except RollflowError as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rollflow: stopped", file=sys.stderr)
        return FAILED


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="rollflow", description="asynchronous RL post-training of language models")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train a policy as a recipe says")
    run.add_argument("recipe", type=Path)
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. train.learning_rate=1e-4")
    run.add_argument("--run-id", help="default: the recipe's name and the time")
    run.set_defaults(command=run_command)

    resume = commands.add_parser("resume", help="go on with a run that was stopped")
    _run_argument(resume, required=True)
    resume.set_defaults(command=resume_command)

    check = commands.add_parser("check", help="validate a recipe")
    check.add_argument("recipe", type=Path)
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    check.set_defaults(command=check_command)

    status = commands.add_parser("status", help="how a run stands (default: the newest)")
    _run_argument(status, required=False)
    status.set_defaults(command=status_command)

    audit = commands.add_parser("audit", help="prove a run's invariants from its storage alone")
    _run_argument(audit, required=True)
    audit.add_argument("--deep", action="store_true", help="from the first entry on, and every object")
    audit.set_defaults(command=audit_command)

    _storage_commands(commands)

    _simulation_commands(commands)

    keys = commands.add_parser("keys", help="every key of a recipe, with its default and meaning")
    keys.add_argument("--hardware", action="store_true", help="those of a hardware file for `simulate`")
    keys.set_defaults(command=keys_command)

    serve = commands.add_parser("serve", help="serve the deployments, the Prefect UI and MLflow until Ctrl-C")
    serve.set_defaults(command=serve_command)

    doctor = commands.add_parser("doctor", help="what is installed, reachable, and which engine would be used")
    doctor.set_defaults(command=doctor_command)
    return top


def _storage_commands(commands: Any) -> None:
    """What reads a run's storage, and needs nothing else."""
    replay = commands.add_parser("replay", help="train a version again from its parent and batch, and compare")
    _run_argument(replay, required=True)
    which = replay.add_mutually_exclusive_group()
    which.add_argument("version", nargs="?", type=int, help="default: the newest")
    which.add_argument("--all", action="store_true", help="every version, from the first")
    replay.set_defaults(command=replay_command)

    inspect = commands.add_parser("inspect", help="lineage: what a run, a version or a trajectory came from")
    _run_argument(inspect, required=True)
    inspect.add_argument("what", nargs="?", help="a version (7) or a trajectory (PROMPT.ATTEMPT.SAMPLE: 12.0.3)")
    inspect.set_defaults(command=inspect_command)

    log = commands.add_parser("log", help="the story of a run, a line for each entry of its log")
    _run_argument(log, required=True)
    log.add_argument("--follow", action="store_true", help="go on with what is new, until Ctrl-C")
    log.add_argument("--json", action="store_true", help="the entries themselves, one a line")
    log.set_defaults(command=log_command)

    repair = commands.add_parser("repair", help="what can be done about a damaged log")
    _run_argument(repair, required=True)
    repair.add_argument("--yes", action="store_true", help="do it")
    repair.set_defaults(command=repair_command)

    export = commands.add_parser("export", help="write a version as a Hugging Face folder")
    _run_argument(export, required=True)
    export.add_argument("version", type=int)
    export.add_argument("folder", type=Path, help="a new folder")
    export.set_defaults(command=export_command)

    gc = commands.add_parser("gc", help="delete objects that nothing in the run needs any more")
    _run_argument(gc, required=True)
    gc.add_argument("--dry-run", action="store_true", help="show them, delete nothing")
    gc.add_argument("--older-than", default="1h", metavar="AGE", help="e.g. 30m, 1h (the default), 2d")
    gc.set_defaults(command=gc_command)


def _simulation_commands(commands: Any) -> None:
    """What runs on a virtual clock."""
    simulate = commands.add_parser("simulate", help="what a recipe would do on other hardware, in virtual time")
    simulate.add_argument("recipe", type=Path)
    simulate.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    where = simulate.add_mutually_exclusive_group(required=True)
    where.add_argument("--hardware", type=Path, metavar="FILE", help="a TOML file, or the name of a shipped one")
    where.add_argument("--from-run", metavar="RUN", help="a recorded run: its own latencies, and how well they predict")
    simulate.add_argument("--store", help="the store that holds RUN; default: the one in the run home")
    simulate.add_argument("--versions", type=_positive, metavar="N", help="default: the recipe's")
    simulate.add_argument("--plot", type=Path, metavar="OUT", help="draw the timeline: OUT.png, OUT.html; OUT: both")
    simulate.add_argument("--save-hardware", type=Path, metavar="FILE", help="with --from-run: write what was fitted")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    simulate.set_defaults(command=simulate_command)
    _plan_command(commands)


def _plan_command(commands: Any) -> None:
    plan = commands.add_parser("plan", help="the best split between rollout and training, and alpha, by simulation")
    plan.add_argument("recipe", type=Path)
    plan.add_argument("--gpus", type=_positive, required=True, metavar="N", help="all of them, to be divided")
    plan.add_argument("--hardware", type=Path, required=True, metavar="FILE", help="as for `simulate`")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    plan.add_argument("--alpha", type=float, default=8.0, metavar="MAX", help="largest alpha tried (default: 8)")
    plan.add_argument("--quick", action="store_true", help="at most 40 shorter simulations instead of 80")
    plan.add_argument("--best", type=_positive, default=6, metavar="N", help="rows of the table (default: 6)")
    plan.add_argument(
        "--max-bias", type=float, default=0.02, metavar="SHARE", help="of the mean length (default: 0.02)"
    )
    plan.add_argument("--max-waste", type=float, default=0.15, metavar="SHARE", help="of all tokens (default: 0.15)")
    plan.add_argument("--write", type=Path, metavar="FILE", help="write the recipe, and FILE-hardware.toml beside it")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    plan.set_defaults(command=plan_command)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number above 0")
    return number


def _run_argument(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument("run", nargs=None if required else "?", help="a run id, or the path or URI of a run's storage")
    command.add_argument("--store", help="the store that holds the run; default: the one in the run home")


def run_command(options: argparse.Namespace) -> int:
    """`rollflow run RECIPE`."""
    from rollflow.flows.config import load_recipe
    from rollflow.flows.locations import new_run_id, store_uri
    from rollflow.flows.prepare import prepare
    from rollflow.flows.services.session import check_addresses

    config = load_recipe(options.recipe, options.set)
    check_addresses(config, store_uri(config))
    context = prepare(config, new_run_id(config.name) if options.run_id is None else options.run_id)
    return drive(context)


def resume_command(options: argparse.Namespace) -> int:
    """`rollflow resume RUN`."""
    from rollflow.flows.locations import find_run
    from rollflow.flows.services.session import check_addresses

    context = find_run(options.run, options.store)
    check_addresses(context.config, context.uri)
    context.order()  # what it asks must be what it asked
    return drive(context)


def drive(context: RunContext) -> int:
    """Start what the run needs, show it until it ends, and print its summary."""
    import signal
    from dataclasses import replace

    from rollflow.flows.services.session import open_session
    from rollflow.flows.views.console import print_summary

    print(f"run {context.run_id} in {context.store.uri}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's way to say Ctrl-C
    try:
        with open_session(context.key, context.config.cluster.address) as session:
            status = _show(session, context)
    except KeyboardInterrupt:
        return _stopped(context)
    if status.phase == "failed":
        reason = status.messages[-1] if status.messages else "no reason was recorded"
        print(f"rollflow: the run failed: {reason}", file=sys.stderr)
        print(f"go on with: rollflow resume {context.uri}", file=sys.stderr)
        return FAILED
    try:
        summary = _closed(context)
    except Unreachable as error:
        print(f"the run has ended. {error}; waiting for it", flush=True)
        summary = _closed(replace(context, patience=context.config.store.patience_seconds))
    print_summary(summary)
    return OK if summary["audit"] == "clean" else FAILED


def _closed(context: RunContext) -> dict[str, Any]:
    """The run's summary, with what the flows have used that were still at work when it was made."""
    import json

    from rollflow.flows.views.summary import SUMMARY
    from rollflow.storage.journal.usage import read_usage

    summary: dict[str, Any] = json.loads(context.store.get(SUMMARY))
    summary["cpu_seconds"] = read_usage(context.store).totals()
    context.store.put(SUMMARY, json.dumps(summary, indent=2).encode())
    return summary


def _show(session: Session, context: RunContext) -> RunStatus:
    """Submit the run and show it until it ends; returns its last status. Ctrl-C cancels it first."""
    from rollflow.flows.views.console import open_view
    from rollflow.flows.views.status import RunStatus

    status = RunStatus(context.run_id)
    try:
        print(f"Prefect {session.page}{session.login}", flush=True)
        flow_run = session.submit(context)
        with open_view(sys.stdout) as view:
            for status in session.follow(context, flow_run):
                view.show(status)
    except KeyboardInterrupt:
        print("\nstopping: ending the flows, the cluster and the server", flush=True)
        session.cancel(context)
        raise
    return status


def _stopped(context: RunContext) -> int:
    """After Ctrl-C: what stands, and how to go on."""
    from dataclasses import replace

    from rollflow.flows.services.session import read_status
    from rollflow.flows.views.audit_table import show_audit
    from rollflow.flows.views.status import STATUS, RunStatus

    try:
        last = read_status(context) or RunStatus(context.run_id, versions=context.config.versions)
        context.store.put(STATUS, replace(last, phase="stopped").to_json().encode())
        report = show_audit(context.store, deep=False)
    except Unreachable as error:
        print(f"stopped; {error}\nonce it does, go on with: rollflow resume {context.uri}")
        return FAILED
    state = "clean" if report.clean else f"{len(report.violations)} violations"
    print(f"stopped at version {report.versions}; audit: {state}; go on with: rollflow resume {context.uri}")
    return FAILED


def check_command(options: argparse.Namespace) -> int:
    """`rollflow check RECIPE`."""
    from rollflow.flows.commands.check import check_files
    from rollflow.flows.config import load_recipe

    config = load_recipe(options.recipe, options.set)
    check_files(config)
    print(
        f"{options.recipe}: good. {config.versions} versions of {config.groups} groups x {config.group_size} "
        f"responses, async_ratio {config.async_ratio:g}, engine {config.engine.kind}, learner {config.train.learner}"
    )
    return OK


def keys_command(options: argparse.Namespace) -> int:
    """`rollflow keys`."""
    from rollflow.flows.config import describe_keys
    from rollflow.tasks.config import RunConfig
    from rollflow.tasks.simulation.hardware import Hardware

    for line in describe_keys(Hardware if options.hardware else RunConfig):
        print(line)
    return OK


def simulate_command(options: argparse.Namespace) -> int:
    """`rollflow simulate RECIPE`."""
    from rollflow.flows.commands.simulate import Outputs, run_simulation
    from rollflow.flows.config import load_hardware, load_recipe

    config, outputs = load_recipe(options.recipe, options.set), Outputs.of(options.plot, options.json)
    if options.from_run is not None:
        from rollflow.flows.commands.predict import compare
        from rollflow.flows.locations import find_run

        compare(config, find_run(options.from_run, options.store), options.versions, outputs, options.save_hardware)
    else:
        run_simulation(config, load_hardware(options.hardware), options.versions, outputs)
    return OK


def plan_command(options: argparse.Namespace) -> int:
    """`rollflow plan RECIPE`."""
    from rollflow.flows.commands.plan import Asked, run_plan
    from rollflow.flows.config import load_hardware, load_recipe
    from rollflow.tasks.simulation.candidates import Limits

    limits = Limits(options.max_bias, options.max_waste)
    asked = Asked(
        options.recipe, options.gpus, options.alpha, options.best, options.quick, limits, options.write, options.json
    )
    planned = run_plan(load_recipe(options.recipe, options.set), load_hardware(options.hardware), asked)
    return OK if planned.recommended else FAILED


def serve_command(_: argparse.Namespace) -> int:
    """`rollflow serve`: start runs from the Prefect UI, compare them in MLflow."""
    import contextlib
    import signal
    import threading

    from rollflow.flows.locations import home
    from rollflow.flows.services.process import MlflowServer
    from rollflow.flows.services.session import SERVED, open_session
    from rollflow.flows.views.tracking import VIEW

    mlflow = MlflowServer(home())
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with open_session(SERVED, "auto", mlflow) as session:
        pages = f"Prefect {session.page}/deployments{session.login}\nMLflow  {mlflow.url}/#/experiments{VIEW}"
        print(f"{pages}\nCtrl-C ends both", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            session.serve(lambda line: print(line, flush=True), ended)
    return OK


def status_command(options: argparse.Namespace) -> int:
    """`rollflow status [RUN]`."""
    from rich.console import Console

    from rollflow.flows.locations import find_run
    from rollflow.flows.views.console import render
    from rollflow.flows.views.status import RunStatus

    context = find_run(options.run, options.store)
    try:
        status = RunStatus.from_json(context.store.get("status.json"))
    except Missing:
        print(f"run {context.run_id} was prepared and has not started")
        return OK
    Console().print(render(status))
    return OK


def audit_command(options: argparse.Namespace) -> int:
    """`rollflow audit RUN`."""
    from rollflow.flows.locations import find_run
    from rollflow.flows.views.audit_table import print_report, show_audit

    context = find_run(options.run, options.store)
    try:
        report = show_audit(context.store, deep=options.deep)
    except Missing:
        raise ConfigError(
            f"run {options.run!r}: there is no such run in {context.uri}; check the run id or --store"
        ) from None
    print_report(report, context.config.shares)
    return OK if report.clean else FAILED


def replay_command(options: argparse.Namespace) -> int:
    """`rollflow replay RUN [VERSION]`."""
    from rollflow.flows.commands.replay import replay
    from rollflow.flows.locations import find_run

    return OK if replay(find_run(options.run, options.store), options.version, options.all) else FAILED


def inspect_command(options: argparse.Namespace) -> int:
    """`rollflow inspect RUN [VERSION|TRAJECTORY]`."""
    from rollflow.flows.commands.inspect import inspect
    from rollflow.flows.locations import find_run

    inspect(find_run(options.run, options.store), options.what)
    return OK


def log_command(options: argparse.Namespace) -> int:
    """`rollflow log RUN`."""
    from rollflow.flows.commands.log import tell
    from rollflow.flows.locations import find_run

    tell(find_run(options.run, options.store), follow=options.follow, as_json=options.json)
    return OK


def repair_command(options: argparse.Namespace) -> int:
    """`rollflow repair RUN`."""
    from rollflow.flows.commands.repair import repair_log
    from rollflow.flows.locations import find_run

    return OK if repair_log(find_run(options.run, options.store), agreed=options.yes) else FAILED


def export_command(options: argparse.Namespace) -> int:
    """`rollflow export RUN VERSION FOLDER`."""
    from rollflow.flows.commands.export import export
    from rollflow.flows.locations import find_run

    context = find_run(options.run, options.store)
    export(context, options.version, options.folder)
    dtype = context.config.policy.dtype
    print(f"version {options.version} of run {context.run_id} is in {options.folder} ({dtype}); serve it as it was")
    print(f"trained with: vllm serve {options.folder} --dtype {dtype}")
    return OK


def gc_command(options: argparse.Namespace) -> int:
    """`rollflow gc RUN`."""
    from rollflow.flows.commands.gc import gc
    from rollflow.flows.locations import find_run

    gc(find_run(options.run, options.store), options.older_than, options.dry_run)
    return OK


def doctor_command(options: argparse.Namespace) -> int:
    """`rollflow doctor`."""
    from rollflow.flows.commands.doctor import doctor, print_checks
    from rollflow.flows.locations import home

    checks = doctor(home())
    print_checks(checks)
    return FAILED if any(check.outcome == "missing" for check in checks) else OK


if __name__ == "__main__":
    sys.exit(main())
