"""Estimates how often a policy answers right, from several responses to each prompt.

    pass_at             chance that at least one of k responses to a prompt is right
    wilson_interval     confidence interval of a share that was measured on n independent responses
    effective_size      number of independent responses that are as informative as several responses to each prompt

Responses to one prompt resemble each other, so that confidence intervals must not count them as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Z95 = 1.959963984540054  # quantile 0.975 of the standard normal distribution


class PromptResult(NamedTuple):
    """The number of responses to a prompt, and how many of them were right."""

    responses: int
    right: int


def pass_at(k: int, responses: int, right: int) -> float:
    """Compute pass@k: the chance that k of a prompt's responses, drawn without replacement, include a right one.

    With n responses, c of them right, pass@k is 1 - C(n - c, k) / C(n, k). This estimate of pass@k is unbiased (Chen et
    al. 2021, Evaluating large language models trained on code, eq. 1).
    """
    return 1 - math.comb(responses - right, k) / math.comb(responses, k)


def mean_pass_at(right: Sequence[int], samples: int) -> dict[int, float]:
    """Compute the mean pass@k over all prompts, for k = 2, 4, 8, ...

    `right` has the number of right responses to each prompt, out of `samples` responses.
    """
    powers = (2**power for power in range(1, samples.bit_length()))
    return {k: math.fsum(pass_at(k, samples, count) for count in right) / len(right) for k in powers}


def wilson_interval(share: float, size: float) -> tuple[float, float]:
    """Compute the 95% confidence interval of a share that was measured on `size` independent responses; return (0, 1)
    if there are no responses.

    With z = 1.96, the interval is (p + z^2/2n ± z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n) (Wilson 1927, Probable
    inference, the law of succession, and statistical inference). The interval is also valid for few responses and for
    shares of 0 and 1.
    """
    if size <= 0:
        return 0.0, 1.0
    spread = Z95**2 / size
    centre, scale = share + spread / 2, 1 + spread
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def effective_size(results: Iterable[PromptResult]) -> float:
    """Compute the number of independent responses that would give the share of right responses the same variance.

    The variance of the share p is the sum of (c - n p)^2 over all prompts, divided by the square of the number of
    responses (Kish 1965, Survey sampling: a ratio of sums). The size is the number of prompts if each prompt has one
    response, or if all responses are right or all are wrong.
    """
    asked = [one for one in results if one.responses]
    total = sum(one.responses for one in asked)
    share = sum(one.right for one in asked) / total if total else 0.0
    squares = math.fsum((one.right - one.responses * share) ** 2 for one in asked)
    if not 0 < share < 1:
        return float(len(asked))
    # If all prompts have the same share, responses to the same prompt appear to be independent.
    return min(float(total), share * (1 - share) * total**2 / squares) if squares else float(total)
