"""Verifiers: a response and its prompt's reference in, a score and the reason out. Run in worker processes only."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and why it was given; `seconds` is the verifier's own time."""

    reward: float
    reason: str
    seconds: float = 0.0


class Verifier(Protocol):
    """Judges one response."""

    def __call__(self, response: str, reference: Mapping[str, Any]) -> Score: ...


def verifier(kind: str) -> Verifier:
    """The verifier that `reward.kind` names, with what it needs imported: that is no response's time."""
    if kind == "reasoning-gym":
        importlib.import_module("reasoning_gym")
    return {"reasoning-gym": reasoning_gym_score, "exact": exact_match}[kind]


def answer_of(response: str, where: str) -> str:
    """The part of a response that is judged: all of it, or what the last <answer> tag holds."""
    if where == "all":
        return response.strip()
    found = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    return found[-1].strip() if found else ""


def exact_match(response: str, reference: Mapping[str, Any]) -> Score:
    """1 if the answer equals the reference's, else 0."""
    right = response == str(reference["answer"]).strip()
    return Score(float(right), "equal" if right else "differs from the reference")


def reasoning_gym_score(response: str, reference: Mapping[str, Any]) -> Score:
    """The family's own scorer, in [0, 1]."""
    reward = float(_scorer(str(reference["family"]))(response, dict(reference)))
    return Score(reward, "right" if reward == 1.0 else "wrong" if reward <= 0.01 else "partly right")


@lru_cache(maxsize=128)
def _scorer(family: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(family)
