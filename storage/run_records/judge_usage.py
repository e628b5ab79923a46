"""Stores how much each judge (a language model that scores responses) was used, as `judge_usage/<section>.json`. A
restarted reward actor continues to count from the stored numbers, so that the token budget of a judge covers the whole
run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore


@dataclass(slots=True)
class JudgeUsage:
    """Counters of a judge's endpoint: answered calls, valid verdicts, and tokens as the endpoint reports them."""

    calls: NonNegativeInt = 0
    verdicts: NonNegativeInt = 0
    tokens: NonNegativeInt = 0

    def encode(self) -> bytes:
        """Return the counters as JSON."""
        return json.dumps(asdict(self)).encode()


RECORD: TypeAdapter[JudgeUsage] = TypeAdapter(JudgeUsage)


def judge_usage_path(section: str) -> str:
    """Return the path where the use of the judge in the given section of the config is stored."""
    return f"judge_usage/{section}.json"


def read_judge_usage(run: ObjectStore, section: str) -> JudgeUsage:
    """Return the stored use of a judge; a missing or damaged record counts as no use."""
    try:
        return RECORD.validate_json(run.get(judge_usage_path(section)))
    except (Missing, Corrupt, ValidationError):
        return JudgeUsage()
