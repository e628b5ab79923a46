"""Summaries of scored responses, and the weighted mean of summaries over the domains of prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class ResponseSummary(NamedTuple):
    """Accuracy, mean reward and pass@k over a set of scored responses."""

    accuracy: float
    reward: float
    pass_at: Mapping[int, float]


def combine_domains(domains: Mapping[str, ResponseSummary], shares: Mapping[str, float]) -> ResponseSummary:
    """Return the mean of the results of all domains, weighted by `shares`; a domain without held-out prompts has weight
    0.
    """
    total = math.fsum(shares[domain] for domain in domains)

    def mean(values: Mapping[str, float]) -> float:
        return math.fsum(shares[domain] * value for domain, value in values.items()) / total

    powers = next(iter(domains.values())).pass_at
    return ResponseSummary(
        mean({domain: one.accuracy for domain, one in domains.items()}),
        mean({domain: one.reward for domain, one in domains.items()}),
        {k: mean({domain: one.pass_at[k] for domain, one in domains.items()}) for k in powers},
    )
