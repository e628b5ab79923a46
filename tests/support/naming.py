"""Finds names, and first words of docstrings and descriptions, that break the rules in the section "Style" of
CONTRIBUTING.md. The check reads only source code.

python -m tests.support.naming    print the faults; `make lint` runs this
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("flows", "tasks", "storage")
LONGEST_TEST = 60
LONGEST_DESCRIPTION = 250  # characters of a key's description


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Participles that do not end with -ed; adjectives and adverbs that were used as names of functions.
PARTICIPLES = _words("""
    begun broken built done found given gone held kept known left lent lost made seen sent shown sound spent taken there
    here told understood without written alike everywhere together behind beside whole idle
""")
# Words that end with -ed or -ing and are verbs or nouns.
VERBS = _words("embed feed need training proceed seed shed speed spread string bring ping")
PRONOUNS = _words("it its they them their this that these those there then")
NOT_IMPERATIVE = _words("""
    a an the this that these those what who which whether how why when where if it its he she they their there here of
    for from in on by with without at to into as one some any each every all both no none not whoever whatever same only
    also after before between true false
""")
ENDS_WITH_S = _words("access address assess compress cross discuss express focus guess miss pass press process")


def find_faults() -> Iterator[str]:
    """Yield one line for each fault: its rule, its file, and the name."""
    names: Counter[str] = Counter()
    for house in HOUSES:
        for file in sorted((ROOT / house).rglob("*.py")):
            tree = ast.parse(file.read_text())
            names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
            yield from check_descriptions(file.relative_to(ROOT).as_posix(), tree)
            for path, node in walk_functions(tree):
                yield from check_function(file.relative_to(ROOT).as_posix(), path, node)
    yield from (f"class-twice {name}" for name, count in names.items() if count > 1)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for _, node in walk_functions(ast.parse(file.read_text())):
            if node.name.startswith("test_") and len(node.name) > LONGEST_TEST:
                yield f"long-test {file.relative_to(ROOT).as_posix()} {node.name}"


def walk_functions(tree: ast.AST, path: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of modules and classes with their dotted path; functions inside of functions are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from walk_functions(node, f"{path}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path}{node.name}", node


def check_function(file: str, path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the faults of one function outside of the tests. Properties are skipped, because they are named and
    described by nouns.
    """
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return
    if is_participle(node.name.strip("_")):
        yield f"participle {file} {path}"
    first = re.match(r"[A-Za-z]+", ast.get_docstring(node) or "")
    if first and not is_imperative(first.group()):
        yield f"first-word {file} {path}"


def check_descriptions(file: str, tree: ast.AST) -> Iterator[str]:
    """Yield the descriptions of keys and options that are too long, or that begin with a pronoun."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("description", "help")
            and isinstance(node.value, ast.Constant)
        ):
            text = str(node.value.value)
            if len(text) > LONGEST_DESCRIPTION:
                yield f"long-description {file} {text[:40]}"
            if text.partition(" ")[0].lower() in PRONOUNS:
                yield f"pronoun {file} {text[:40]}"


def is_participle(name: str) -> bool:
    """Report whether a function's name is only a participle or an adjective, without a verb and an object."""
    return "_" not in name and name not in VERBS and (name in PARTICIPLES or name.endswith(("ed", "ing")))


def is_imperative(word: str) -> bool:
    """Report whether a docstring's first word can be a verb in the imperative."""
    word = word.lower()
    if word in NOT_IMPERATIVE or (word.endswith(("ed", "ing")) and word not in VERBS):
        return False
    return not word.endswith("s") or word in ENDS_WITH_S


if __name__ == "__main__":
    if wrong := list(find_faults()):
        sys.exit("\n".join([*wrong, "These names or first lines break the rules of CONTRIBUTING.md."]))
