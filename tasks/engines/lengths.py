"""Draws response lengths for the timed engine. A drawn length depends only on the prompt and on the seed of the
request.

    length = quantile(z),  z = sqrt(rho) * z_prompt + sqrt(1 - rho) * z_sample

`z_prompt` and `z_sample` are standard normal numbers: one is drawn from the prompt's tokens, the other from the
request's seed. Thus the logarithms of lognormal lengths of one prompt have correlation rho. The quantile function is
that of a lognormal distribution, or of measured lengths.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from rollflow.tasks.engines.config import TimedEngineConfig

PROMPTS_KEPT = 65536  # number of prompts for which the drawn number is cached


class ResponseLengths:
    """Draws response lengths, in real tokens. A drawn length may exceed the token limit of the request."""

    def __init__(self, config: TimedEngineConfig) -> None:
        self._median, self._sigma = config.median_tokens, config.sigma
        self._shared, self._own = math.sqrt(config.correlation), math.sqrt(1.0 - config.correlation)
        self._measured = sorted(config.lengths)

    def draw(self, prompt: Sequence[int], sample: random.Random) -> int:
        """Draw the length of one response (at least 1 token) with one normal number from `sample`."""
        z = self._own * sample.gauss(0.0, 1.0)
        if self._shared:
            z += self._shared * draw_prompt_number(tuple(prompt))
        if self._measured:
            share = NormalDist().cdf(z)
            return self._measured[min(int(share * len(self._measured)), len(self._measured) - 1)]
        return max(1, round(self._median * math.exp(self._sigma * z)))


@lru_cache(maxsize=PROMPTS_KEPT)
def draw_prompt_number(prompt: tuple[int, ...]) -> float:
    """Draw a standard normal number that depends only on the prompt's tokens, and is the same in every process."""
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big")).gauss(0.0, 1.0)
