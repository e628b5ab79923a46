"""Drafts from past responses: they equal the drafts of a slow search, and the kept responses stay within their
limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.tasks.engines.past_responses import (
    LEAST_CHANCE,
    LONGEST_MATCH,
    MOST_PLACES,
    PER_PROMPT,
    SHORTEST_MATCH,
    PastResponses,
)

TOKENS = st.lists(st.integers(0, 3), max_size=12)
PROMPT = np.array([7, 8], np.int32).tobytes()


def pack(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def find_places(past: Sequence[Sequence[int]], response: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, by a slow search, the rest of past responses after each position that a response may follow."""
    same = [tuple(one[len(response) :]) for one in past if list(one[: len(response)]) == list(response)]
    if same:
        return same
    newest = list(response)[-LONGEST_MATCH:]
    for length in range(len(newest), SHORTEST_MATCH - 1, -1):
        found = [
            tuple(one[place:])
            for one in past
            for place in range(length, len(one) + 1)
            if list(one[place - length : place]) == newest[-length:]
        ]
        if found:
            return found
    return []


def draft_slowly(past: Sequence[Sequence[int]], response: Sequence[int], count: int) -> list[int]:
    rest, made, chance = find_places(past, response), list[int](), 1.0
    while rest and len(made) < count:
        votes = Counter(one[0] if one else -1 for one in rest)
        token = max(votes, key=votes.__getitem__)
        chance *= (votes[token] + 1) / (len(rest) + 2)
        if token == -1 or chance < LEAST_CHANCE:
            break
        made.append(token)
        rest = [one[1:] for one in rest if one and one[0] == token]
    return made


@settings(max_examples=300, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=6), TOKENS, st.integers(1, 5))
def test_first_draft_equals_the_draft_of_a_slow_search(past: list[list[int]], response: list[int], count: int) -> None:
    """A cursor that reads a response at once is at the positions that a search from the beginning finds."""
    kept = PastResponses()
    for one in past:
        kept.add(PROMPT, pack(one))
    cursor = kept.follow(PROMPT)
    newest_first = [one for one in reversed(past) if one]
    if cursor is None:
        assert not newest_first
        return
    cursor.read(response)
    assert cursor.length == len(response)
    assert cursor.draft(count) == draft_slowly(newest_first, response, count)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), TOKENS), max_size=60), st.integers(1, 60), st.integers(1, PER_PROMPT))
def test_kept_tokens_stay_below_their_limit(added: list[tuple[int, list[int]]], most: int, per_prompt: int) -> None:
    kept = PastResponses(most, per_prompt)
    for prompt, response in added:
        kept.add(pack([prompt] * 2), pack(response))
        kept.follow(pack([prompt] * 2))
        assert kept.tokens <= most
        held = {key: list(rows) for key, rows in kept._kept.items()}
        assert kept.tokens == sum(len(key) + sum(map(len, rows)) for key, rows in held.items()) // 4
        assert all(len(rows) <= per_prompt for rows in held.values())
        assert kept._texts.keys() <= held.keys()
    kept.keep_texts(())
    assert not kept._texts


def test_often_repeated_token_matches_at_few_positions() -> None:
    """Otherwise a draft would take seconds: its cost grows with the square of the number of positions."""
    kept = PastResponses()
    for number in range(PER_PROMPT):
        kept.add(PROMPT, pack([number, *[5] * 100]))
    cursor = kept.follow(PROMPT)
    assert cursor is not None
    cursor.read([99, *[5] * 20])
    assert len(cursor._places) <= MOST_PLACES
    assert cursor.draft(4) == [5] * 4


def test_newest_past_response_decides_between_equal_drafts() -> None:
    kept = PastResponses()
    for one in ([1, 2, 3], [1, 4, 5]):
        kept.add(PROMPT, pack(one))
    cursor = kept.follow(PROMPT)
    assert cursor is not None
    cursor.read([1])
    assert cursor.draft(1) == [4]


def test_drafts_come_only_from_responses_to_the_same_prompt() -> None:
    kept = PastResponses()
    kept.add(PROMPT, pack([1, 2, 3]))
    assert kept.follow(pack([7, 9])) is None


def test_prompt_used_longest_ago_is_dropped_first() -> None:
    kept = PastResponses(most=8)
    for prompt in (0, 1):
        kept.add(pack([prompt]), pack([5, 6, 7]))
    assert kept.follow(pack([0])) is not None  # used after prompt 1
    kept.add(pack([2]), pack([5]))
    assert [kept.follow(pack([prompt])) is not None for prompt in (0, 1, 2)] == [True, False, True]
