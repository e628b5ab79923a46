"""Drafts the next tokens of a response from past responses to the same prompt, for speculative decoding.

    past responses    7 4 9 2    7 4 8 1    7 4 9 5
    the response      7 4                              drafted: 9, because two of three past responses continue so

- A draft is a guess: an engine verifies every drafted token, so past responses change the speed and nothing else.
- A draft continues like the past responses that begin with the same tokens as the response so far. If there are none, a
  draft continues as past responses do after the longest match with the response's newest tokens.
- A draft ends before its probability of acceptance, estimated from the past responses, falls below `LEAST_CHANCE`.
- Memory is bounded: only the `PER_PROMPT` newest responses to a prompt are kept. Once all kept prompts and responses
  together have more tokens than a limit, the prompt that was not used for the longest time is dropped.

Tokens are passed as the bytes of 32-bit integers, as token arrays store them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

PER_PROMPT = 16  # largest number of responses that are kept for a prompt
KEPT_TOKENS = 4_000_000  # default limit on the tokens of all kept prompts and responses together
MOST_PLACES = 256  # largest number of positions in past responses that a response follows at the same time
SHORTEST_MATCH, LONGEST_MATCH = 2, 16  # fewest and most newest tokens of a response that are searched in past responses
LEAST_CHANCE = 0.3
END = -1  # marks the end of a past response; no token has this id
TOKEN = np.dtype(np.int32)


class PastResponses:
    """The past responses to each prompt, in bounded memory."""

    def __init__(self, most: int = KEPT_TOKENS, per_prompt: int = PER_PROMPT) -> None:
        self._most, self._per_prompt = most, per_prompt
        self._kept: OrderedDict[bytes, deque[bytes]] = OrderedDict()  # the prompt used last is at the end
        self._texts: dict[bytes, PastText] = {}  # prompt with a running response -> past responses to it
        self._bytes = 0

    @property
    def tokens(self) -> int:
        """The number of tokens of all kept prompts and responses."""
        return self._bytes // TOKEN.itemsize

    def add(self, prompt: bytes, response: bytes) -> None:
        """Keep a response to a prompt. The newest response must be added last."""
        if not response:
            return
        responses = self._kept.get(prompt)
        if responses is None:
            responses = self._kept[prompt] = deque()
            self._bytes += len(prompt)
        elif len(responses) == self._per_prompt:
            self._bytes -= len(responses.pop())
        responses.appendleft(response)
        self._bytes += len(response)
        self._texts.pop(prompt, None)
        self._kept.move_to_end(prompt)
        while self.tokens > self._most:
            self._drop()

    def _drop(self) -> None:
        """Forget the prompt that was not used for the longest time."""
        prompt, responses = self._kept.popitem(last=False)
        self._texts.pop(prompt, None)
        self._bytes -= len(prompt) + sum(map(len, responses))

    def follow(self, prompt: bytes) -> DraftCursor | None:
        """Return a cursor that follows a response to this prompt, or None if no past response to the prompt is kept."""
        responses = self._kept.get(prompt)
        if responses is None:
            return None
        self._kept.move_to_end(prompt)
        text = self._texts.get(prompt)
        if text is None:
            text = self._texts[prompt] = PastText(responses)
        return DraftCursor(text)

    def keep_texts(self, prompts: Iterable[bytes]) -> None:
        """Forget what was computed for all prompts except `prompts`, which have running responses."""
        self._texts = {prompt: self._texts[prompt] for prompt in prompts if prompt in self._texts}


class PastText:
    """The past responses to one prompt in one row, newest first: END, tokens, END, tokens, END."""

    def __init__(self, responses: Iterable[bytes]) -> None:
        end = np.array([END], TOKEN)
        parts = [end]
        self.starts: list[int] = []  # index in `tokens` of the first token of each response
        place = 1
        for response in responses:
            self.starts.append(place)
            parts += [np.frombuffer(response, TOKEN), end]
            place += len(parts[-2]) + 1
        self.tokens = array("i", np.concatenate(parts).tobytes())  # reading one item is faster than in a NumPy array
        self._row = np.frombuffer(self.tokens, TOKEN)
        self.drafts: dict[tuple[int, ...], list[int]] = {}  # followed indices in `tokens` -> longest draft

    def find(self, newest: Sequence[int]) -> list[int]:
        """Return the indices after the longest match with a response's newest tokens, in the newest past responses
        first.

        At most `MOST_PLACES` indices are returned, because a token that is repeated often would match at very many
        indices.
        """
        if not newest:
            return []
        places = np.flatnonzero(self._row == newest[-1]) + 1
        length = 1
        while length < len(newest):  # the row begins with END, so no match begins outside the row
            longer = places[self._row[places - length - 1] == newest[-length - 1]]
            if not len(longer):
                break
            places, length = longer, length + 1
        return places[:MOST_PLACES].tolist() if length >= SHORTEST_MATCH else []


class DraftCursor:
    """Follows one running response through the past responses to its prompt, and drafts the next tokens."""

    __slots__ = ("_newest", "_places", "_text", "length")

    def __init__(self, text: PastText) -> None:
        self._text, self._places = text, text.starts
        self._newest: deque[int] = deque(maxlen=LONGEST_MATCH)
        self.length = 0  # number of tokens of the response that were read

    def read(self, tokens: Iterable[int]) -> None:
        """Read the next tokens of the response."""
        row, places = self._text.tokens, self._places
        for token in tokens:
            self.length += 1
            self._newest.append(token)
            places = [place + 1 for place in places if row[place] == token]
        self._places = places or self._text.find(self._newest)

    def draft(self, count: int) -> list[int]:
        """Return at most `count` drafted tokens, possibly none."""
        key = tuple(self._places)
        drafts = self._text.drafts
        if key not in drafts:
            drafts[key] = self._compute(key)
        return drafts[key][:count]

    def _compute(self, places: Sequence[int]) -> list[int]:
        row, drafted, chance = self._text.tokens, list[int](), 1.0
        while places:
            votes: dict[int, int] = {}
            for place in places:
                votes[row[place]] = votes.get(row[place], 0) + 1
            token = max(votes, key=votes.__getitem__)  # the newest response decides between equal votes
            chance *= (votes[token] + 1) / (len(places) + 2)  # Laplace's rule of succession
            if token == END or chance < LEAST_CHANCE:
                break
            drafted.append(token)
            places = [place + 1 for place in places if row[place] == token]
        return drafted
