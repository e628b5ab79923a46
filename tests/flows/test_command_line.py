"""Tests the command line as a user sees it: groups, help, earlier names, and the run that a command uses if no run is
named.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands import compare
from rollflow.flows.commands.cli import main, option_rules
from rollflow.flows.commands.cli.options import parse_options
from rollflow.flows.locations import find_run
from rollflow.storage.objects import open_store
from tests.support.described import describe
from tests.support.refused import refused
from tests.support.waiting import HANG_SECONDS

RECIPE = "flows/recipes/sorting.toml"
GROUPS = {
    "Train": ["init", "check", "run", "sweep", "resume", "stop"],
    "Watch": ["status", "log", "inspect", "compare"],
    "Play and evaluate": ["play", "evaluate"],
    "Prove": ["audit", "replay", "rejudge"],
    "Export and clean up": ["export", "gc"],
    "Plan": ["plan"],
    "Serve": ["serve", "deploy", "nightly"],
    "Look up": ["keys", "doctor"],
}
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]
EARLIER = ["cancel", "completion", "down", "list", "logs", "repair", "simulate", "top", "up"]
OF_A_RUN = [
    "resume",
    "stop",
    "log",
    "log --processes",
    "inspect",
    "inspect 7",
    "inspect 12.0.3",
    "audit --deep",
    "audit --repair",
]
OF_A_RUN += ["replay", "replay 7", "replay --all", "rejudge", "rejudge 7", "rejudge --last 2", "export 7 folder", "gc"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create two runs in a store of their own, `early` and then `late`; return the store."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROLLFLOW_STORE", str(tmp_path / "store"))
    for name in ("early", "late"):
        describe(open_store(f"{tmp_path}/store/runs/{name}"), name)
    return tmp_path / "store"


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


# --- groups and help -------------------------------------------------------------------------------------------


def test_help_shows_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    groups: dict[str, list[str]] = {}
    for line in help_of(capsys).partition("options:")[0].splitlines():
        if line in GROUPS:
            groups[line] = []
        elif found := re.match(r"  ([a-z]+) +[A-Z]", line):
            groups[list(groups)[-1]].append(found[1])
            assert len(line) <= 80, line
    assert groups == GROUPS
    assert len(VERBS) <= 23


@pytest.mark.parametrize(("verb", "other", "effect"), [("init", "keys", "Write"), ("keys", "init", "Print")])
def test_help_of_init_and_keys_mentions_the_other_command(
    verb: str, other: str, effect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = [line for line in help_of(capsys).splitlines() if line.startswith(f"  {verb} ")]
    assert line.split()[1] == effect
    assert f"`{other}`" in line


def test_each_command_has_one_module() -> None:
    folder = Path("flows/commands")
    modules = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")}
    modules |= {file.parent.name for file in folder.glob("*/__init__.py")} - {"cli"}
    assert modules == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_command_help_has_a_description_and_an_example(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    text = help_of(capsys, verb)
    assert text.startswith(f"usage: rollflow {verb} ")
    [described] = [line for line in text.splitlines() if re.match(r"[A-Z].*\.$", line)]
    assert 2 <= len(re.findall(r"\.( |$)", described)) <= 4
    example = text.partition("\nexample:\n  ")[2].strip()
    program, *words = shlex.split(example)
    assert (program, parse_options(words).verb) == ("rollflow", verb)


def test_help_loads_no_large_library() -> None:
    """`rollflow --help` takes less than 0.3 s because of this."""
    code = (
        "import sys\nfrom rollflow.flows.commands.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('pydantic', 'numpy', 'pyarrow', 'rich', 'asyncio') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", EARLIER)
def test_error_for_an_old_command_name_gives_the_new_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sentences = {refused(capsys, name, *rest) for rest in ([], ["one"], ["--help"])}
    assert sentences == {f"`rollflow {name}` was renamed; write `rollflow {option_rules.EARLIER[name]}`"}
    verb, *options = option_rules.EARLIER[name].split()
    assert verb in [*VERBS, "--completion"]
    assert [option for option in options if option.startswith("--") and option not in help_of(capsys, verb)] == []


# --- options and arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("status one --all", "--all and RUN exclude each other"),
        ("status --watch --json", "--watch and --json exclude each other"),
        ("status --watch --all", "--watch and --all exclude each other"),
        ("audit --repair --deep", "--repair and --deep exclude each other"),
        ("audit --repair --anchor mlflow", "--repair and --anchor exclude each other"),
        ("audit --yes", "--yes has an effect only with --repair"),
        ("replay one 7 --all", "--all and VERSION exclude each other"),
        ("replay 7 --all", "--all and VERSION exclude each other"),
        ("replay one seven", "VERSION = 'seven': give a whole number"),
        ("serve --end --background", "--end and --background exclude each other"),
        ("serve --end --ray-port 7", "--end and --ray-port exclude each other"),
        ("plan r.toml --from-run one --gpus 8", "--gpus and --from-run exclude each other"),
        ("plan r.toml --hardware h --gpus 8 --versions 3", "--gpus and --versions exclude each other"),
        ("plan r.toml --hardware h --alpha 0", "--alpha has an effect only with --gpus"),
        ("plan r.toml --hardware h --store s", "--store has an effect only with --from-run"),
        ("doctor --set seed=1", "--set has an effect only with --cluster"),
    ],
)
def test_option_without_effect_is_refused(
    words: str, sentence: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(open_store(f"{runs}/runs/one"), "one")
    assert sentence in refused(capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "run", "what"),
    [
        ("inspect", None, None),
        ("inspect one", "one", None),
        ("inspect 7", None, "7"),
        ("inspect 12.0.3", None, "12.0.3"),
        ("inspect 12.0", None, "12.0"),
        ("inspect one 7", "one", "7"),
        ("inspect one --json 7", "one", "7"),
        ("inspect 1.2.3.4", "1.2.3.4", None),
        ("inspect store/runs/7", "store/runs/7", None),
        ("inspect 7 3", "7", "3"),
    ],
)
def test_inspect_reads_a_single_number_as_a_version(words: str, run: str | None, what: str | None) -> None:
    options = parse_options(words.split())
    assert (options.run, options.what) == (run, what)


@pytest.mark.parametrize(
    "words", ["export one --store s 7 out", "export --store s one 7 out", "export one 7 out --store s"]
)
def test_options_may_be_given_between_arguments(words: str) -> None:
    options = parse_options(words.split())
    assert (options.run, options.version, options.folder, options.store) == ("one", 7, Path("out"), "s")


@pytest.mark.parametrize("run_id", ["7", "12.0", "12.0.3"])
def test_run_id_that_is_a_number_is_refused(
    run_id: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    sentence = refused(capsys, "run", RECIPE, "--run-id", run_id)
    meaning = "which commands would read as a policy version of the newest run"
    assert sentence == f"run id = '{run_id}' is a number, {meaning}; add a letter to the id"
    assert not (tmp_path / "store").exists()


def test_earlier_run_with_a_number_as_id_is_found_by_path(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(open_store(f"{runs}/runs/7"), "7")
    assert main(["inspect", f"{runs}/runs/7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "7"


# --- the newest run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", OF_A_RUN)
def test_command_without_run_uses_the_newest_run(
    words: str, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command does the same as with the newest run's name, and names that run on standard error."""
    monkeypatch.setattr("rollflow.flows.commands.run.drive", lambda context: print(context.uri) or 0)
    verb, *rest = words.split()
    unnamed, said = main([verb, *rest]), capsys.readouterr()
    named, wanted = main([verb, "late", *rest]), capsys.readouterr()
    assert said.err.startswith("newest run: late\n")
    assert (unnamed, said.out, said.err.removeprefix("newest run: late\n")) == (named, wanted.out, wanted.err)
    assert main([verb, "none", *rest]) == 2


def test_status_command_without_run_shows_the_newest_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr() == ("run late was prepared and has not started\n", "")


def test_compare_without_runs_uses_the_two_newest_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe(open_store(f"{runs}/runs/latest"), "latest")
    compared: list[str] = []

    def read(contexts: Any) -> Any:
        compared.extend(context.run_id for context in contexts)
        raise KeyboardInterrupt  # the comparison itself has tests of its own

    monkeypatch.setattr(compare, "read_compared", read)
    assert main(["compare"]) == 130
    assert compared == ["late", "latest"]


def test_newest_run_of_an_empty_store_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    for words in (["stop"], ["audit"], ["compare"], ["status"], ["replay", "7"]):
        assert "there is no run in" in refused(capsys, *words)


def test_newest_run_is_the_one_created_last(runs: Path) -> None:
    assert find_run(None).run_id == "late"
    describe(open_store(f"{runs}/runs/a-first-by-name"), "a-first-by-name")
    assert find_run(None).run_id == "a-first-by-name"
