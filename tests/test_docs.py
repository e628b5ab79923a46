"""Tests of the docs: links, headings, paths, commands and options exist, and the configuration page is current."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollflow.flows.commands.cli.options import build_parser
from rollflow.flows.config_keys import describe_keys, list_keys
from rollflow.flows.keys_page import keys_page
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section
from rollflow.tasks.simulation.hardware import Hardware

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT, ROOT / "docs", ROOT / "docs" / "cluster", ROOT / "benchmarks")
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w/.-])(?:flows|tasks|storage|tests|benchmarks|docs|infra)/[\w./-]*[\w/]")
MODULE = re.compile(r"python -m (benchmarks\.\w+)")
COMMAND = re.compile(r"\brollflow ([a-z]+)\b([^`\n|]*)")
KEYS = {*list_keys(RunConfig), *(f"{side}.{key}" for side in ("rollout", "train") for key in ("gpus", "hour"))}
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in KEYS if "." in key}))
KEY = re.compile(rf"(?<![\w/.\[-])(?:{SECTIONS})\.(?!json|png)[a-z_]+(?:\.[a-z_]+)*(?![\w/(]|\.[a-z])")
# Commands that need an engine, a cluster or a cloud, which tests do not have.
UNTRIED = re.compile(r"(docker|helm|kubectl (?!kustomize )|aws|sudo|ray job)\b")
TARGET = re.compile(r"\bmake ([a-z]+(?:-[a-z]+)*)\b")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code(page: Path) -> Iterator[str]:
    """Yield the code of a page: inline code, and the lines of fenced blocks."""
    text = page.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    yield from re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub creates them from its headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_link(page: Path, link: str) -> str | None:
    """Return the fault of a link; None if its target exists, or is outside of the repository."""
    if link.startswith(("http://", "https://")):
        return None
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return f"{link}: there is no such file"
    return f"{link}: there is no such heading" if anchor and anchor not in headings(target) else None


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Return the verbs of the command line with their options."""
    (found,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def wrong_command(verb: str, rest: str) -> str | None:
    """Return the fault of `rollflow VERB ...`; None if verb and options exist."""
    known = verbs()
    if verb not in known:
        return f"rollflow {verb}: there is no such verb"
    unknown = [option for option in re.findall(r"--[a-z-]+", rest) if option not in known[verb]._option_string_actions]
    return f"rollflow {verb} {unknown[0]}: there is no such option" if unknown else None


@each_page
def test_links_in_the_docs_have_targets(page: Path) -> None:
    assert [wrong for link in LINK.findall(page.read_text()) if (wrong := broken_link(page, link))] == []


@each_page
def test_paths_named_in_the_docs_exist(page: Path) -> None:
    named = {path for text in code(page) if "<" not in text for path in NAMED.findall(text)}
    assert sorted(path for path in named if not any((ROOT / f"{path}{end}").exists() for end in ("", ".py"))) == []


@each_page
def test_documented_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    wrong: list[str | None] = []
    for text in code(page):
        wrong += [wrong_command(*found) for found in COMMAND.findall(text)]
        wrong += [f"make {name}: there is no such target" for name in TARGET.findall(text) if name not in targets]
        files = [name.replace(".", "/") + ".py" for name in MODULE.findall(text)]
        wrong += [f"{name}: there is no such file" for name in files if not (ROOT / name).exists()]
    assert [one for one in wrong if one] == []


@each_page
def test_table_rows_in_the_docs_are_complete(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.rstrip().endswith("|")] == []
    assert re.findall(r"^\|.*\n(?!\||\n)(.+)", text, flags=re.MULTILINE) == []


@each_page
def test_documented_config_keys_exist(page: Path) -> None:
    assert sorted({key for text in code(page) for key in KEY.findall(text) if key not in KEYS}) == []


def test_scheduling_table_names_existing_keys() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "scheduling.md").read_text(), flags=re.MULTILINE)
    named = [key for row in rows for key in re.findall(r"`([\w.]+)`", row)]
    assert [key for key in named if not {key, f"rollout.{key}"} & KEYS] == []
    assert len(named) > 10


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "cluster").glob("*.md")), ids=lambda page: page.name)
def test_documented_commands_that_were_not_run_are_marked(page: Path) -> None:
    text = page.read_text()
    lines = [
        line for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for line in block.splitlines()
    ]
    assert [line for line in lines if UNTRIED.match(line) and "†" not in line] == []
    assert " ".join(text.split()).count("A command with † was not run") == ("†" in text)


def test_every_command_is_described_in_the_docs() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [verb for verb in verbs() if f"`rollflow {verb}" not in text] == []


def test_configuration_page_is_current() -> None:
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == keys_page(), "run `rollflow keys --markdown > docs/configuration.md`"


@pytest.mark.parametrize("section", [RunConfig, Hardware])
def test_every_config_key_has_a_description(section: type[Section]) -> None:
    assert [line for line in describe_keys(section) if ": " not in line.partition("  # ")[2]] == []
