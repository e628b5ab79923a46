"""The `[reward]` section of a run's TOML file, with one class for each kind of scorer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Imported, Section, refuse
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, SandboxConfig
from rollflow.tasks.scorers.base_config import JUDGING, RewardBase
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.model.config import ModelReward


class ReasoningGymReward(RewardBase):
    kind: Literal["reasoning-gym"] = Field(
        "reasoning-gym", description="verifier of the reasoning-gym data set that generated the question"
    )


class ExactReward(RewardBase):
    kind: Literal["exact"] = Field(
        "exact", description="compares the response with the reference answer; only an equal response is right"
    )


class ImportReward(Imported, RewardBase):
    kind: Literal["import"] = Field(
        "import",
        description="your own verifier: a Python function that is annotated to return a Score or a number, or a list "
        "of these for several responses",
    )
    at_once: int = Field(
        32,
        gt=0,
        le=4096,
        description="largest number of responses that a worker scores at a time, if the function is asynchronous or "
        "takes several responses",
    )


class CodeReward(RewardBase):
    kind: Literal["code"] = Field(
        "code", description='runs the program in the response on the test cases of the prompt row\'s column "cases"'
    )
    fenced: bool = Field(
        True,
        description="true: the program is the last fenced block of Python in the response; false: the program is the "
        "whole response",
    )
    all_or_nothing: bool = Field(
        False,
        description="whether a program that fails a case scores 0; false: the score is the share of cases that pass",
    )
    case_seconds: float = Field(
        4.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for a program on one test case"
    )
    at_once: int = Field(4, gt=0, le=4096, description="largest number of responses that a worker scores at a time")
    deadline_seconds: float = Field(
        120.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for scoring one response on all its test cases",
    )
    adaptive: AdaptiveDeadline | None = None
    sandbox: SandboxConfig = BubblewrapSandbox()

    @model_validator(mode="after")
    def _can_adapt(self) -> Self:
        if self.adaptive and self.adaptive.min_seconds >= self.case_seconds:
            cure = f"it must be below reward.case_seconds = {self.case_seconds:g}; lower it, or raise case_seconds"
            refuse("reward.adaptive.min_seconds", self.adaptive.min_seconds, cure)
        return self


class MathsReward(RewardBase):
    kind: Literal["maths"] = Field(
        "maths",
        description="compares the final answer with the reference answer by math-verify: equal values are right",
    )
    marked: bool = Field(
        False,
        description="whether an answer counts only in \\boxed{}, in an answer tag or after ####; false: without such a "
        "mark, the last expression of the response is the answer",
    )
    decimals: int = Field(
        6,
        ge=0,
        le=15,
        description="number of digits after the decimal point to which decimal numbers are rounded before they are "
        "compared",
    )


class ChoiceReward(RewardBase):
    kind: Literal["choice"] = Field(
        "choice", description="multiple choice: compares the chosen letter with the reference answer"
    )


class RegexReward(RewardBase):
    kind: Literal["regex"] = Field(
        "regex",
        description="matches the response against a regular expression; with the key group, compares the text of that "
        "group of the expression with the reference answer",
    )
    pattern: str | None = Field(
        None,
        description="regular expression, in which a dot also matches line ends; default: the prompt row's column "
        "`pattern`",
    )
    match: Literal["full", "search"] = Field(
        "full",
        description="what must match the regular expression. full: the whole response; search: any part of the "
        "response; if several parts match, the last one counts",
    )
    group: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*$",
        description="name of a group of the regular expression, (?P<name>...), whose text must equal the reference "
        "answer; default: any match is right",
    )
    ignore_case: bool = Field(False, description="whether upper and lower case are the same")

    @model_validator(mode="after")
    def _has_group(self) -> Self:
        if self.pattern is None:
            return self
        try:
            groups = re.compile(self.pattern, re.DOTALL).groupindex
        except (re.error, RecursionError, OverflowError) as error:
            refuse("pattern", self.pattern, f"the pattern is not a valid regular expression ({error}); correct it")
        if self.group is not None and self.group not in groups:
            refuse("group", self.group, f"the pattern has no group (?P<{self.group}>...); name one of its groups")
        return self


class InstructionsReward(RewardBase):
    kind: Literal["instructions"] = Field(
        "instructions", description="checks the constraints in a prompt row, in the format of IFEval"
    )
    strict: bool = Field(
        False,
        description="whether a response that breaks a constraint scores 0; false: the score is the share of "
        "constraints that the response follows",
    )


PartConfig = Annotated[
    ReasoningGymReward
    | ExactReward
    | ImportReward
    | CodeReward
    | MathsReward
    | ChoiceReward
    | RegexReward
    | InstructionsReward
    | JudgeReward
    | ModelReward,
    Field(discriminator="kind"),
]
REMOTE = (JudgeReward, ModelReward)  # kinds of scorer that do not run in worker processes
# keys that a composite reward sets for its parts, so that a part cannot set them
SHARED = (*JUDGING, "format", "length_penalty", "second_verdict_share", "special_tokens")
SHARED_BY_WORKERS = ("at_once", "deadline_seconds", "start_seconds", "workers")


DEADLINE = "deadline"  # name of the part of a score that marks a program as ended by an adaptive deadline
# names that no part of a composite reward may have, because other parts of a score have them
RESERVED = ("format", "length_penalty")


class CompositePart(Section):
    """One part of a composite reward."""

    weight: float = Field(
        1.0, ge=-1e6, le=1e6, description="factor by which the value of this reward part is multiplied in the sum"
    )
    scorer: PartConfig = Field(
        default=ExactReward(), description="scorer of this reward part, with the keys of its kind"
    )

    @property
    def shared_keys(self) -> list[str]:
        """The keys of the part's scorer that the composite reward sets."""
        names = SHARED if isinstance(self.scorer, REMOTE) else (*SHARED, *SHARED_BY_WORKERS)
        return [name for name in names if name in type(self.scorer).model_fields]

    @model_validator(mode="after")
    def _leaves_shared_keys(self) -> Self:
        for name in self.shared_keys:
            info = type(self.scorer).model_fields[name]
            if getattr(self.scorer, name) != info.get_default(call_default_factory=True):
                cure = f"the parts share this key; set {name} of the composite reward for all of them"
                refuse(f"scorer.{name}", getattr(self.scorer, name), cure)
        return self


class CompositeReward(RewardBase):
    fixed: ClassVar[Mapping[str, str]] = {
        **RewardBase.fixed,
        "parts": "earlier responses were judged by them",
        "requires": "earlier responses were judged by it",
    }

    kind: Literal["composite"] = Field(
        "composite", description="several scorers in one: the reward is the weighted sum of their values"
    )
    parts: dict[str, CompositePart] = Field(
        min_length=1, max_length=16, description="scorers of the composite reward, by name"
    )
    requires: tuple[str, ...] = Field(
        (), description="names of reward parts that must be correct; if one of them is not, the response scores 0"
    )
    at_once: int = Field(
        4,
        gt=0,
        le=4096,
        description="largest number of responses that a worker scores at a time, if a reward part runs programs",
    )
    deadline_seconds: float = Field(
        120.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds in which all reward parts together must score one response",
    )

    @property
    def failure_value(self) -> float:
        """The score of a response if a reward part fails or misses its deadline: the sum of the negative weights."""
        return sum(min(0.0, part.weight) for part in self.parts.values())

    @property
    def is_mixed(self) -> bool:
        """True if a part is a judge or a reward model, so that each part is a separate scorer."""
        return any(isinstance(part.scorer, REMOTE) for part in self.parts.values())

    @property
    def part_scorers(self) -> dict[str, PartConfig]:
        """The scorers of the parts, with the shared keys of the composite reward, but without its penalties. The key
        `answer = "tag"` of the composite reward applies to all parts.
        """
        tag = {"answer": "tag"} if self.answer == "tag" else {}
        return {
            name: part.scorer.model_copy(
                update={key: getattr(self, key) for key in part.shared_keys if key not in RESERVED} | tag
            )
            for name, part in self.parts.items()
        }

    @property
    def worker_processes(self) -> int:
        """Number of worker processes of all parts."""
        if not self.is_mixed:
            return self.workers
        return sum(scorer.worker_processes for scorer in self.part_scorers.values())

    @property
    def has_helpers(self) -> bool:
        """True unless a part is a judge or a reward model."""
        return not self.is_mixed

    @property
    def scoring_slots(self) -> int:
        """Number of responses that all parts can score at the same time; for a reward model, the number of simultaneous
        calls.
        """
        return sum(scorer.workers for scorer in self.part_scorers.values()) if self.is_mixed else self.workers

    @property
    def compares_group(self) -> bool:
        """True if a part of the reward is a judge that compares the responses to a prompt with each other."""
        return any(part.scorer.compares_group for part in self.parts.values())

    def permits_change(self, key: str) -> bool:
        """Return whether a key of a reward part may change when a run is resumed, although the key `parts` is fixed. A
        judge or a reward model allows the same changes as in a separate section.
        """
        match key.split("."):
            case ["parts", name, "scorer", changed, *_] if name in self.parts:
                scorer = self.parts[name].scorer
                return isinstance(scorer, REMOTE) and changed not in scorer.fixed
        return False

    @model_validator(mode="after")
    def _judges_again(self) -> Self:
        """Reject `judge_tries = 0` if a part is a judge or a reward model, which may be unavailable."""
        if self.is_mixed and not self.judge_tries:
            refuse(
                "judge_tries",
                0,
                "a part is a judge or a reward model, which can be unavailable for a while; choose 1 or more",
            )
        return self

    @model_validator(mode="after")
    def _names_parts(self) -> Self:
        for name in self.parts:
            if not re.fullmatch(r"[A-Za-z_][\w-]{0,39}", name) or name in RESERVED:
                refuse(
                    "parts",
                    name,
                    f"a part's name must consist of letters, digits, _ and -, and be none of {RESERVED}; rename it",
                )
        for name in self.requires:
            if name not in self.parts:
                refuse("requires", name, f"no part has this name; name one of {', '.join(self.parts)}")
        return self

    @model_validator(mode="after")
    def _reads_one_tag(self) -> Self:
        """Reject `answer = "tag"` in a part if the composite reward sets it, too, because no response has a tag within
        a tag.
        """
        tagged = [name for name, part in self.parts.items() if part.scorer.answer == "tag"]
        if tagged and self.answer == "tag":
            cure = "the composite reward already gives all parts only the text in the tag; remove the key of the part"
            refuse(f"parts.{tagged[0]}.scorer.answer", "tag", cure)
        return self

    @model_validator(mode="after")
    def _adapts_in_one_part(self) -> Self:
        """Reject a second part with adaptive deadlines, because a data row has only one record of program times."""
        adaptive = [name for name, part in self.parts.items() if getattr(part.scorer, "adaptive", None)]
        if len(adaptive) > 1:
            refuse(
                "parts",
                ", ".join(adaptive),
                "only one part of a composite reward may have adaptive deadlines; remove all [adaptive] sections "
                "but one",
            )
        return self


RewardConfig = Annotated[
    ReasoningGymReward
    | ExactReward
    | ImportReward
    | CodeReward
    | MathsReward
    | ChoiceReward
    | RegexReward
    | InstructionsReward
    | JudgeReward
    | ModelReward
    | CompositeReward,
    Field(discriminator="kind"),
]


def name_section(name: str) -> str:
    """Return the config section of the scorer with this name: `rewards.<name>`, or `reward` for the name ""."""
    return f"rewards.{name}" if name else "reward"


def split_scorer(section: str, config: RewardConfig) -> dict[str, RewardConfig]:
    """Map the config section to its scorer; for a composite reward, map the sections of its parts to their scorers."""
    if not isinstance(config, CompositeReward):
        return {section: config}
    return {name_part(section, name): part.scorer for name, part in config.parts.items()}


def split_scorers(scorers: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """Map config sections to scorers; replace each composite reward by its parts."""
    split = (split_scorer(name_section(name), config) for name, config in scorers.items())
    return {section: config for parts in split for section, config in parts.items()}


def list_remote(scorers: Mapping[str, RewardConfig]) -> dict[str, JudgeReward | ModelReward]:
    """Map config sections to the judges and reward models among the scorers and their parts."""
    return {section: one for section, one in split_scorers(scorers).items() if isinstance(one, REMOTE)}


def name_part(section: str, part: str) -> str:
    """Return the config section of a part's scorer, for the composite reward in `section`."""
    return f"{section}.parts.{part}.scorer"


def has_adaptive_deadlines(config: RewardConfig) -> bool:
    """Return whether the deadlines of test cases adapt to the measured times of correct programs."""
    return find_deadline_part(config) is not None


def find_deadline_part(config: RewardConfig) -> str | None:
    """Return the name of the part of a score that marks an adaptive deadline; None if deadlines are fixed."""
    if isinstance(config, CompositeReward):
        adaptive = (name for name, part in config.parts.items() if has_adaptive_deadlines(part.scorer))
        return next((f"{name}.{DEADLINE}" for name in adaptive), None)
    return DEADLINE if isinstance(config, CodeReward) and config.adaptive is not None else None
