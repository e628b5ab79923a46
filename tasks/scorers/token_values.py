"""Values that a score gives to tokens or to steps of a response.

A scorer sees the response as text, so it identifies a step of the response by the position in the text at which the
step ends. The value of a step belongs to the token with the last character of the step. NaN marks a token without a
value. If several steps end in one token, the value of the token is the sum of the steps' values.

    text     "2+2=4.\\n\\nSo 5."                             steps end at 6 and 13
    tokens   "2", "+2", "=4", ".", "\\n\\n", "So", " 5."     values of the 4th and the 7th token
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.scorers.base import LARGEST, Score, failure_score
from rollflow.tasks.scorers.base_config import RewardBase
from rollflow.tasks.scorers.verifier import find_answer

if TYPE_CHECKING:
    from rollflow.tasks.policies.tokenizer import PolicyTokenizer


def split_steps(text: str, separator: str = "\n\n") -> list[tuple[int, str]]:
    """Split a text into steps that are separated by `separator`; return the end position and the text of each step.

    Steps that contain only white space are left out.
    """
    steps, end = list[tuple[int, str]](), 0
    for step in text.split(separator):
        end += len(step)
        if step.strip():
            steps.append((end, step))
        end += len(separator)
    return steps


def shift_steps(score: Score, start: int, length: int) -> Score:
    """Convert the step ends of a score from positions in a part of a text to positions in the whole text. The part
    begins after `start` characters.

    Raises:
        ValueError: a step ends outside of the part, which has `length` characters.
    """
    for end, _ in score.step_values:
        if not 0 < end <= length:
            raise ValueError(
                f"a step must end after 1 to {length} characters, the length of the text, but one ends after {end}"
            )
    return replace(score, step_values=tuple((end + start, value) for end, value in score.step_values))


def place_values(
    score: Score, config: RewardBase, tokenizer: PolicyTokenizer, tokens: Sequence[int], response: str
) -> Score:
    """Convert values of steps to values of tokens; `response` is the text of the tokens.

    If the values do not fit the response, the score of a failure is returned.
    """
    if not score.has_token_values:
        return score
    start, answer = find_answer(response, config.answer)
    try:
        steps = shift_steps(score, start, len(answer)).step_values
        values_T = _read_values(score.token_values, len(tokens))
        if steps:
            ends, values_S = zip(*steps, strict=True)
            place_S = np.array(tokenizer.find_tokens(tokens, ends, config.special_tokens))
            values_T[place_S] = np.nan_to_num(values_T[place_S])
            np.add.at(values_T, place_S, values_S)
        return replace(score, token_values=_to_float32(values_T), step_values=())
    except ValueError as error:
        return replace(failure_score("verifier", error), value=config.failure_value)


def check_length(score: Score, tokens: int) -> None:
    """Raise `ValueError` unless a score has one value for each token of the response, or no values.

    The score of an environment must not have values of steps, because an environment sees tokens.
    """
    if score.step_values:
        raise ValueError(
            "an environment returned a score with step_values, which only scorers may use; return token_values"
        )
    if score.has_token_values:
        _read_values(score.token_values, tokens)


def move_to_sampled(values: Sequence[float], is_sampled: np.ndarray) -> Float32s | None:
    """Move the values of the environment's tokens to sampled tokens; return None if no sampled token gets a value.

    The value of a token of the environment is added to the value of the last sampled token before the token. Values
    before the first sampled token are left out, because they belong to no action of the policy.
    """
    values_T, sampled = Float32s.of(values).array, np.flatnonzero(is_sampled)
    given = np.flatnonzero(~np.isnan(values_T))
    owner = np.searchsorted(sampled, given, "right") - 1
    given, owner = given[owner >= 0], owner[owner >= 0]
    if not given.size:
        return None
    sums_T, found_T = np.zeros(len(values_T)), np.full(len(values_T), math.nan)
    np.add.at(sums_T, sampled[owner], values_T[given])
    found_T[sampled[owner]] = sums_T[sampled[owner]]
    return _to_float32(found_T)


def align_values(score: Score, tokens: Int32s, response: Int32s) -> Score:
    """Extend a score with values for the last tokens of a response to all tokens of the response; the other tokens get
    NaN.

    Raises:
        ValueError: the response does not end with `tokens`.
    """
    before = len(response) - len(tokens)
    if before < 0 or response[before:] != tokens:
        raise ValueError(
            "the scorer gave values to tokens with which the response does not end; let it score the last tokens of "
            "episode.response"
        )
    return replace(score, token_values=Float32s.same(math.nan, before) + score.token_values)  # type: ignore[operator]


def add_values(values: Float32s | None, more: Mapping[int, float], tokens: int) -> Float32s:
    """Add the values in `more` (token position -> value) to `values`; None means that no token has a value."""
    sums_T = np.full(tokens, math.nan) if values is None else values.array.astype(np.float64)
    for at, value in more.items():
        sums_T[at] = np.nan_to_num(sums_T[at]) + value
    return _to_float32(sums_T)


def _read_values(values: Sequence[float | None], tokens: int) -> np.ndarray:
    """Return checked token values as float64, with NaN for tokens without a value; raise `ValueError` on a wrong
    length.
    """
    if not len(values):
        return np.full(tokens, math.nan)
    if len(values) != tokens:
        raise ValueError(
            f"the score has {len(values)} token values, but the response has {tokens} tokens; give one value per token"
        )
    return Float32s.of(values).array.astype(np.float64)  # type: ignore[arg-type]  # checked values are numbers


def _to_float32(values_T: np.ndarray) -> Float32s:
    """Convert token values to float32; sums that are too large become the largest float32."""
    return Float32s(np.clip(values_T, -LARGEST, LARGEST).astype(np.float32).tobytes())
