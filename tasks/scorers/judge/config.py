"""The `[reward]` section of a judge: a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section, refuse
from rollflow.tasks.scorers.base_config import RewardBase

NAME = re.compile(r"[A-Za-z_][\w-]{0,39}", re.ASCII)  # the name of a rubric's item
# names that no rubric item may have, because the score or the judge's answer uses them
RESERVED = ("answer", "disagreement", "format", "reason")
MOST_ITEMS = 32
# mode of the judge -> placeholders that its prompt template must contain
FIELDS = {"verdict": ("response",), "rubric": ("response", "rubric"), "pairwise": ("first", "second")}
_JUDGED = "earlier responses were judged by it"


class RubricItem(Section):
    """A statement about a response, which the judge finds true or false."""

    text: str = Field(min_length=1, description="the statement, for example: The response names its sources.")
    weight: float = Field(
        1.0,
        ge=-1e6,
        le=1e6,
        description="weight of the statement; a negative weight lowers the reward if the statement is true",
    )


class JudgeReward(RewardBase):
    fixed: ClassVar[Mapping[str, str]] = {
        **RewardBase.fixed,
        **dict.fromkeys(
            ("model", "mode", "system", "template", "rubric", "lowest", "highest", "repeats", "opponents"), _JUDGED
        ),
        **dict.fromkeys(("temperature", "explain", "max_response_chars", "extra_body"), _JUDGED),
    }

    kind: Literal["judge"] = Field("judge", description="a language model behind an OpenAI-compatible endpoint")
    url: str = Field(
        description="base address of the endpoint, e.g. http://127.0.0.1:8000/v1; a URL with a user, a password or a "
        "query is rejected",
    )
    model: str = Field(min_length=1, description="name of the model, as the endpoint knows it")
    token_env: str = Field(
        "", description="name of the environment variable with the API key of the endpoint; empty: no key is sent"
    )
    mode: Literal["verdict", "rubric", "pairwise"] = Field(
        "verdict",
        description="how the judge evaluates responses. verdict: the judge gives a score. rubric: the judge finds each "
        "statement of "
        "a rubric true or false. pairwise: the judge compares the responses of a group with each other",
    )
    system: str | None = Field(
        None, min_length=1, description="system message to the judge; default: a built-in text for the mode"
    )
    template: str | None = Field(
        None,
        description="message to the judge, with {question}, {answer} and {response}; mode rubric: also {rubric}; mode "
        "pairwise: {first} and {second} in place of {response}; default: a built-in text for the mode",
    )
    rubric: dict[str, RubricItem] = Field(
        default_factory=dict,
        max_length=MOST_ITEMS,
        description="statements of the mode rubric, by name; default: the prompt row's column `rubric`",
    )
    lowest: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="lowest score that the judge may give in the mode verdict; this score becomes the reward 0",
    )
    highest: int = Field(
        10,
        ge=-1000,
        le=1000,
        description="highest score that the judge may give in the mode verdict; this score becomes the reward 1",
    )
    explain: bool = Field(True, description="whether the judge first gives a reason, which is stored with the response")
    opponents: int | None = Field(
        None,
        ge=2,
        multiple_of=2,
        description="largest number of other responses to the same prompt with which a response is compared in the "
        "mode pairwise; default: all",
    )
    repeats: int = Field(
        1,
        gt=0,
        le=16,
        description="number of verdicts that the judge gives on each response or pair; the mean of the verdicts "
        "counts; in the mode pairwise, every second verdict sees the pair in the other order",
    )
    temperature: float = Field(0.0, ge=0, le=2, description="sampling temperature of the judge")
    max_tokens: int = Field(
        1024, gt=0, description="largest number of tokens of an answer of the judge, its reasoning included"
    )
    max_response_chars: int = Field(
        32_000,
        ge=100,
        description="largest number of characters of a response that the judge reads; the middle of a longer response "
        "is left out, and a mark says so",
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="further fields of each request, for example of vLLM; no secrets"
    )
    tries: int = Field(
        4,
        gt=0,
        le=20,
        description="largest number of calls for one verdict. A call is repeated after a lost connection, a time-out, "
        "an HTTP status 408, 409, 429 or 5xx, or an answer without a verdict; pauses between calls grow, or follow the "
        "endpoint's Retry-After header",
    )
    call_seconds: float = Field(60.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for one call to the judge")
    deadline_seconds: float = Field(
        300.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one verdict, with all calls and pauses; after this time, the response counts "
        "as not judged",
    )
    at_once: int = Field(32, gt=0, le=4096, description="largest number of calls to the judge at the same time")
    tokens_per_minute: int | None = Field(
        None,
        gt=0,
        description="largest number of tokens per minute, in requests to the judge and its answers together; default: "
        "no limit",
    )
    budget_tokens: int | None = Field(
        None,
        gt=0,
        description="number of tokens of the judge after which the run fails; the run can be resumed with a larger "
        "number; default: no limit",
    )
    cache_entries: int = Field(
        10_000,
        ge=0,
        description="largest number of verdicts that are kept in memory, so that an equal response to an equal "
        "question is not judged again",
    )
    judge_tries: int = Field(
        3,
        ge=1,
        le=100,
        description="number of tries to score a response while the endpoint gives no verdict; after the last try, the "
        "key unjudged decides what happens",
    )
    workers: Literal[1] = Field(1, description="not used: the reward actor itself calls the endpoint")

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^@\s?#]+", url):
            cure = "give http:// or https://, a host and a path, without a user, a password or a query; name the "
            refuse("reward.url", url.rpartition("@")[2].partition("?")[0], f"{cure}key's variable in reward.token_env")
        return url

    @property
    def worker_processes(self) -> int:
        """Number of worker processes of a judge, which is 0."""
        return 0

    @property
    def compares_group(self) -> bool:
        """True if the score of a response depends on the other responses to the same prompt."""
        return self.mode == "pairwise"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.lowest >= self.highest:
            refuse(
                "reward.highest",
                self.highest,
                f"the highest score must be above reward.lowest = {self.lowest}; raise reward.highest",
            )
        if self.mode == "verdict" and self.highest - self.lowest > 100:
            refuse("reward.highest", self.highest, "the judge may choose among 101 scores at most; narrow the scale")
        if self.rubric and self.mode != "rubric":
            refuse("reward.mode", self.mode, 'only the mode "rubric" reads reward.rubric; set reward.mode = "rubric"')
        if self.opponents and self.mode != "pairwise":
            refuse("reward.opponents", self.opponents, 'only the mode "pairwise" has opponents; remove the key')
        if self.repeats > 1 and not self.temperature and self.mode != "pairwise":
            cure = "at reward.temperature = 0 repeated verdicts are equal; raise the temperature, or set repeats = 1"
            refuse("reward.repeats", self.repeats, cure)
        return self

    @model_validator(mode="after")
    def _names_items(self) -> Self:
        for name in self.rubric:
            if not NAME.fullmatch(name) or name in RESERVED:
                refuse(
                    "reward.rubric",
                    name,
                    "an item's name must consist of letters, digits, _ and -, and be none of "
                    f"{', '.join(RESERVED)}; rename it",
                )
        if self.rubric and not any(item.weight > 0 for item in self.rubric.values()):
            refuse(
                "reward.rubric",
                [*self.rubric],
                "no statement of the rubric has a weight above 0; give at least one a positive weight",
            )
        return self

    @model_validator(mode="after")
    def _has_fields(self) -> Self:
        for field in FIELDS[self.mode] if self.template is not None else ():
            if f"{{{field}}}" not in str(self.template):
                cure = f"it lacks {{{field}}}, so the judge would not see it; add {{{field}}}"
                refuse("reward.template", str(self.template)[:60], cure)
        return self
