"""Finds stop strings: a response ends with the token that completes a stop string of its request.

A stop string stays in the response that it ends. All inference engines use this module, so that they end a response at
the same token.

Only the newest tokens are decoded for a search: a stop string of n bytes has at most n tokens. A search decodes `SPARE`
more tokens, because some tokenizers drop a blank at the beginning of a text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from rollflow.tasks.policies.tokenizer import PolicyTokenizer

SPARE = 8

Decode = Callable[[Sequence[int]], str]


class StopWatch:
    """Reads a response token by token until the response contains a stop string."""

    __slots__ = ("_decode", "_newest", "_strings", "stopped")

    def __init__(self, strings: Sequence[str], decode: Decode, tokens: Iterable[int] = ()) -> None:
        """Prepare to search for `strings`; `tokens` is the beginning of the response, without a stop string."""
        self._strings, self._decode = strings, decode
        longest = max((len(one.encode()) for one in strings), default=0)
        self._newest: deque[int] = deque(tokens, longest + SPARE)
        self.stopped = False

    def feed(self, token: int) -> bool:
        """Read the next token of the response; return whether the token completes a stop string."""
        if not self._strings:
            return False
        self._newest.append(token)
        text = self._decode(list(self._newest))
        self.stopped = any(one in text for one in self._strings)
        return self.stopped

    def find_end(self, tokens: Iterable[int]) -> int | None:
        """Return the number of tokens up to the end of the first stop string, or None if no stop string is complete."""
        if not self._strings:
            return None
        return next((count for count, token in enumerate(tokens, 1) if self.feed(token)), None)


NO_STOPS = StopWatch((), lambda tokens: "")


def watch_stops(strings: Sequence[str], folder: Path | None, tokens: Iterable[int] = ()) -> StopWatch:
    """Create a `StopWatch` with the tokenizer in `folder`; without a folder, each token is a Unicode code point.

    Raises:
        ConfigError: a request has stop strings, and the policy's folder has no tokenizer.
    """
    if not strings:
        return NO_STOPS  # all responses without stop strings share it, because a `StopWatch` takes 0.8 kB
    return StopWatch(strings, _read_decoder(folder) if folder else _decode_code_points, tokens)


@lru_cache(maxsize=4)
def _read_decoder(folder: Path) -> Decode:
    return PolicyTokenizer(folder).decode


def _decode_code_points(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))
