"""The version of a scorer: a short hash of what decides its scores.

    version = sha256(keys of the section, code of the scorer, versions of its libraries)[:12]

Deterministic scorers with the same version always give the same response the same score. Comments and docstrings do not
affect a version. The same is true of config keys that only set how many responses are scored at the same time, or how
often a call is tried. Modules that a user-defined function imports, and the model behind a judge's endpoint, are not
part of the version.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from rollflow.tasks.runtime.imports import code_of
from rollflow.tasks.runtime.sections import Imported
from rollflow.tasks.scorers.config import REMOTE, CompositeReward, RewardConfig, split_scorer

LENGTH = 12  # number of hexadecimal digits of a scorer's version
# config keys that do not affect scores
OPERATIONS = {
    *("at_once", "judge_tries", "max_unjudged", "second_verdict_share", "start_seconds", "unjudged", "workers"),
    *("batch_tokens", "cpus", "gpus", "max_batch"),
    *("budget_tokens", "cache_entries", "call_seconds", "token_env", "tokens_per_minute", "tries"),
}
# keys of the parts of a composite scorer that do not affect its version
_OF_PARTS: dict[str, Any] = {"parts": {"__all__": {"scorer": {"second_verdict_share", "unjudged"}}}}
EVERY = ("base.py", "token_values.py", "verifier.py")  # names of the source files that every scorer uses
# kind of scorer -> source files that only this kind uses
SOURCES: dict[str, tuple[str, ...]] = {
    "choice": ("text/choice.py", "text/marked.py"),
    "code": (
        "code/scorer.py",
        "code/cases.py",
        "code/deadlines.py",
        "code/guest.py",
        "code/pytest_case.py",
        "code/pytest_guest.py",
    ),
    "composite": ("composite.py", "routed.py"),
    "exact": ("exact.py",),
    "import": (),
    "instructions": ("text/instructions.py", "text/constraints.py", "text/language.py"),
    "judge": ("judge/endpoint.py", "judge/prompts.py", "judge/scorer.py"),
    "maths": ("text/maths.py", "text/maths_text.py", "text/marked.py"),
    "model": ("model/classifier.py", "model/copies.py", "model/inputs.py", "model/scorer.py"),
    "reasoning-gym": ("reasoning_gym.py",),
    "regex": ("text/regex.py",),
}
# kind of scorer -> packages that compute its scores
LIBRARIES: dict[str, tuple[str, ...]] = {
    "code": ("pytest",),
    "instructions": ("langdetect",),
    "maths": ("math-verify", "latex2sympy2_extended", "sympy"),
    "model": ("torch", "transformers", "tokenizers"),
    "reasoning-gym": ("reasoning-gym",),
}

Description = dict[str, Any]


def compute_version(config: RewardConfig, section: str = "reward") -> str:
    """Return the version of the scorer that the section `[section]` describes, as this machine would run it.

    Raises:
        ConfigError: a user-defined function cannot be imported.
    """
    return hash_description(describe_scorer(config, section))


def hash_description(description: Description) -> str:
    """Return the version of a scorer, which is a hash of the scorer's description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:LENGTH]


def describe_scorer(config: RewardConfig, section: str = "reward") -> Description:
    """Return what decides a scorer's scores: its config keys, hashes of source files, and versions of libraries.

    Raises:
        ConfigError: a user-defined function cannot be imported.
    """
    kinds = {"": config, **split_scorer("", config)}
    files = sorted({*EVERY, *(file for one in kinds.values() for file in SOURCES.get(one.kind, ()))})
    libraries = sorted({name for one in kinds.values() for name in LIBRARIES.get(one.kind, ())})
    return {
        "keys": _dump_keys(config),
        "code": {file: _hash_file(file) for file in files},
        "own_code": {place: code_of(section + place, one) for place, one in kinds.items() if isinstance(one, Imported)},
        "libraries": {"python": platform.python_version(), **{name: _find_package(name) for name in libraries}},
    }


def _dump_keys(config: RewardConfig) -> Description:
    """Return the config keys that affect scores."""
    found = config.model_dump(mode="json", exclude={**dict.fromkeys(OPERATIONS, True), **_OF_PARTS})
    for name, part in config.parts.items() if isinstance(config, CompositeReward) else ():
        if isinstance(part.scorer, REMOTE):
            found["parts"][name]["scorer"] = part.scorer.model_dump(mode="json", exclude=OPERATIONS)
    return found


def _hash_file(file: str) -> str:
    return hash_code((Path(__file__).parent / file).read_bytes())


def hash_code(source: bytes) -> str:
    """Return the hash of Python code, without its comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _find_package(name: str) -> str:
    try:
        return package_version(name)
    except PackageNotFoundError:  # the scorer's own error names the missing package
        return ""
