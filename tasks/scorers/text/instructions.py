"""The verifier `instructions`, which checks whether a response follows constraints, as in the IFEval benchmark.

A data row has IFEval's columns: `instruction_id_list` with names of constraints, and `kwargs` with an object of
arguments for each constraint. The score is the share of constraints that the response follows. With `reward.strict`,
the score is 1 if the response follows all constraints, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import MOST_PARTS, Score
from rollflow.tasks.scorers.text.constraints import check_constraint

Constraints = list[tuple[str, Mapping[str, Any]]]


def follow_instructions(response: str, reference: Mapping[str, Any], *, strict: bool = False) -> Score:
    """Score a response by the constraints of its data row; each constraint is a part of the score."""
    parts = dict[str, float]()
    for name, arguments in read_constraints(reference):
        same = sum(part.partition("#")[0] == name for part in parts)
        followed = check_constraint(name, response, arguments)
        parts[f"{name}#{same + 1}" if same else name] = float(followed)
    if not response.strip():
        return Score(0.0, "the response is empty", Outcome.UNPARSABLE, parts)
    count = sum(map(int, parts.values()))
    value = float(count == len(parts)) if strict else count / len(parts)
    first = next((f"; not {name}" for name, part in parts.items() if not part), "")
    outcome = Outcome.CORRECT if count == len(parts) else Outcome.PARTIAL if count else Outcome.WRONG
    return Score(value, f"{count} of {len(parts)} constraints followed{first}", outcome, parts)


def read_constraints(reference: Mapping[str, Any]) -> Constraints:
    """Return the constraints of a data row with their arguments; raise `ValueError` if the row has no constraint."""
    names, arguments = reference.get("instruction_id_list"), reference.get("kwargs")
    if column := next((c for c in ("instruction_id_list", "kwargs") if isinstance(reference.get(c), str)), None):
        raise ValueError(f'the column "{column}" is text, not a list; if it is JSON, name it in prompts.json_columns')
    if not isinstance(names, Sequence) or not 0 < len(names) <= MOST_PARTS:
        raise ValueError(f'the column "instruction_id_list" of the row must be a list of 1 to {MOST_PARTS} constraints')
    if not isinstance(arguments, Sequence) or len(arguments) != len(names):
        raise ValueError('the column "kwargs" of the row must be a list with one object for each constraint')
    if not all(one is None or isinstance(one, Mapping) for one in arguments):
        raise ValueError('the column "kwargs" of the row contains an entry that is not a JSON object or null')
    return [(str(name), one or {}) for name, one in zip(names, arguments, strict=True)]


def check_constraints(reference: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a constraint of a data row cannot be checked, or `Unjudged` if a package is missing."""
    for name, arguments in read_constraints(reference):
        check_constraint(name, "1.", arguments)  # a text without letters, so that no language has to be detected
