"""The verifier `regex`, which checks whether the answer matches a regular expression from the config or from the data
row.

A response on which the regular expression backtracks endlessly gets the outcome "timeout", because its worker process
is killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.config import RegexReward

LONGEST_SHOWN = 60  # largest number of characters of a group's text in a score's reason


def match_pattern(response: str, reference: Mapping[str, Any], *, config: RegexReward) -> Score:
    """Score a response by whether it matches the pattern of the config or of the column "pattern". If the config names
    a group, the text of the group is compared with the reference answer.
    """
    compiled = compile_pattern(config, reference)
    if config.match == "full":
        found = compiled.fullmatch(response)
    else:
        found = None
        for found in compiled.finditer(response):  # noqa: B007 - the last match counts
            pass
    if config.group is None:
        return Score(float(found is not None), "the pattern matches" if found else "the pattern does not match")
    if found is None or found[config.group] is None:
        return Score(0.0, "the pattern does not match", Outcome.UNPARSABLE)
    said, wanted = found[config.group].strip(), str(reference["answer"]).strip()
    right = said.casefold() == wanted.casefold() if config.ignore_case else said == wanted
    return Score(float(right), f"{said[:LONGEST_SHOWN]} {'equals' if right else 'differs from'} the reference")


def compile_pattern(config: RegexReward, reference: Mapping[str, Any]) -> re.Pattern[str]:
    """Return the compiled pattern with which to score responses to a data row.

    Raises:
        ValueError: the data row has no valid pattern, or the pattern lacks the group that the config names.
    """
    pattern = config.pattern if config.pattern is not None else reference.get("pattern")
    if not isinstance(pattern, str):
        raise ValueError(
            'the row has no text in its column "pattern", and reward.pattern is not set; give one of the two'
        )
    return _compile(pattern, config.ignore_case, config.group)


@lru_cache(maxsize=1024)
def _compile(pattern: str, ignore_case: bool, group: str | None) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is not a valid regular expression ({error})") from None
    if group is not None and group not in compiled.groupindex:
        raise ValueError(f"the pattern {pattern!r} has no group (?P<{group}>...), but reward.group names this group")
    return compiled
