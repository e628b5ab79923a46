"""The config keys of the `[reward]` section that all kinds of scorer have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section, refuse


class Format(Section):
    """The required format of responses; a response in any other format gets a lower reward."""

    pattern: str = Field(
        ".*<answer>.*</answer>.*",
        description="regular expression that the whole response must match; a dot also matches line ends",
    )
    penalty: float = Field(
        0.1,
        gt=0,
        le=1,
        description="amount that is subtracted from the reward of a response that does not match the pattern",
    )

    @field_validator("pattern")
    @classmethod
    def _is_one(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            refuse("pattern", pattern, f"the pattern is not a valid regular expression ({error}); correct it")
        return pattern


class LengthPenalty(Section):
    """The penalty for a long response; it rises linearly with the response's length (DAPO's soft overlong punishment,
    Yu et al. 2025, eq. 13).
    """

    unit: Literal["tokens", "characters"] = Field(
        "tokens",
        description="unit of the response's length: tokens of the policy, or characters of the response's text",
    )
    start: int = Field(
        ge=0, description="largest length of a response without a length penalty, in the unit that the key unit names"
    )
    full: int = Field(
        gt=0,
        description="smallest length of a response with the whole length penalty, in the unit that the key unit names",
    )
    penalty: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="amount that is subtracted from the reward of a response of the length full or longer; a response "
        "between start and full loses less",
    )

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.full <= self.start:
            refuse(
                "full",
                self.full,
                f"the penalty rises from start = {self.start} up to full, so full must be larger; choose a larger "
                "number",
            )
        return self

    def amount(self, length: int) -> float:
        """Return the penalty for a response of this length, which is measured in `unit`."""
        return self.penalty * min(1.0, max(0.0, (length - self.start) / (self.full - self.start)))


# config keys that decide what happens to unjudged responses
JUDGING = ("judge_tries", "max_unjudged", "unjudged")


class RewardBase(Section):
    """The keys that all kinds of verifier have."""

    fixed: ClassVar[Mapping[str, str]] = {
        "kind": "earlier rewards and evaluations were computed with it",
        "answer": "earlier responses were judged by it",
        "special_tokens": "earlier responses were judged by it",
        "correct_from": "earlier accuracies were computed with it",
    }

    answer: Literal["all", "tag"] = Field(
        "all",
        description="part of the response that is scored. all: the whole response; tag: only the text between <answer> "
        "and </answer>",
    )
    special_tokens: bool = Field(
        True,
        description="whether the scored text contains special tokens, such as answer tags; it never contains the final "
        "stop token",
    )
    correct_from: float | None = Field(
        None,
        gt=0,
        description="smallest reward with which a response counts as correct in the reported accuracy; default: the "
        "verifier decides, or only a reward of 1 or more counts as correct",
    )
    format: Format | None = None
    length_penalty: LengthPenalty | None = None
    workers: int = Field(
        1, gt=0, description="number of worker processes that score responses; each scores one response at a time"
    )
    deadline_seconds: float = Field(
        10.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for scoring one response; a slower response gets reward 0 with a reason",
    )
    judge_tries: int = Field(
        3,
        ge=0,
        le=100,
        description="number of tries to score a response while scoring is impossible, for example because a judge "
        "server is away; after the last try, the key unjudged decides what happens. With 0, the response gets reward "
        "0 at once",
    )
    max_unjudged: int = Field(
        20,
        gt=0,
        description="the run fails after this number of consecutive prompts with a response that could not be judged; "
        "prompts that run at the same time count once",
    )
    unjudged: Literal["issue_again", "leave_out"] = Field(
        "issue_again",
        description="what happens if a response could not be judged. issue_again: all responses to the prompt are "
        "discarded, and the prompt is issued again; leave_out: only this response is left out of training and of the "
        "baseline, if 2 others were judged",
    )
    second_verdict_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="largest share of the responses that a run scores a second time, to report a scorer whose two "
        "scores of a response differ; the second score is not stored",
    )
    start_seconds: float = Field(
        120.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the start of a reward worker, which includes loading its verifier",
    )

    @property
    def failure_value(self) -> float:
        """The score of a response on which the scorer failed, before any format penalty."""
        return 0.0

    @property
    def unread_value(self) -> float:
        """The reward of a response that ended its worker process or missed its deadline. All penalties are subtracted,
        because the format and the length of the response are unknown.
        """
        penalties = [section.penalty for section in (self.format, self.length_penalty) if section]
        return self.failure_value - sum(penalties)

    @property
    def worker_processes(self) -> int:
        """Number of worker processes that the Ray actor for rewards starts for this scorer."""
        return self.workers

    @property
    def has_helpers(self) -> bool:
        """True if helpers of the reward actor may also score responses (see the folder `spread`)."""
        return self.worker_processes > 0

    @property
    def scoring_slots(self) -> int:
        """Number of responses that can be scored at the same time; for a reward model, the number of its simultaneous
        calls.
        """
        return self.workers

    @property
    def compares_group(self) -> bool:
        """True if the score of a response depends on the other responses to the same prompt."""
        return False

    @property
    def leaves_out(self) -> bool:
        """True if a response that nobody could judge is left out of its group."""
        return self.unjudged == "leave_out"

    @model_validator(mode="after")
    def _leaves_out_after_tries(self) -> Self:
        if self.leaves_out and not self.judge_tries:
            cure = "with judge_tries = 0, an unjudged response has the reward 0; set judge_tries to 1 or more"
            refuse("unjudged", self.unjudged, cure)
        return self


LEAST_JUDGED = 2  # smallest number of judged responses in a group from which an unjudged response may be left out


def find_judging_faults(sections: Mapping[str, RewardBase], group_size: int) -> Iterator[tuple[str, object, str]]:
    """Yield each key about unjudged responses that contradicts another scorer or `group_size`, with its value and a
    fix.
    """
    if len({scorer.judge_tries > 0 for scorer in sections.values()}) > 1:
        cure = "either every scorer of a run judges again, or none does; give all scorers 1 or more, or all 0"
        yield "reward.judge_tries", next(iter(sections.values())).judge_tries, cure
    for section, scorer in sections.items():
        if scorer.leaves_out and group_size <= LEAST_JUDGED:
            cure = f"a group keeps at least {LEAST_JUDGED} judged responses; set group_size above {LEAST_JUDGED}"
            yield f"{section}.unjudged", scorer.unjudged, cure
