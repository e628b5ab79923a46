"""Defines the sections `[rollout]` and `[evaluation]` of a run's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section

Routing = Literal["least-work", "prefix"]


class FilterConfig(Section):
    """Dynamic sampling: replaces groups without a learning signal by groups of other prompts."""

    min_mean: float | None = Field(
        None, description="largest mean reward with which a group is filtered out as too hard; default: no limit"
    )
    max_mean: float | None = Field(
        None, description="smallest mean reward with which a group is filtered out as too easy; default: no limit"
    )
    min_std: float | None = Field(
        None,
        ge=0,
        description="largest standard deviation of rewards with which a group is filtered out; default: no limit",
    )
    max_consecutive: int = Field(
        1000,
        gt=0,
        description="number of consecutive filtered groups after which the run fails, because its prompts give "
        "nothing to learn from",
    )


class RolloutConfig(Section):
    """How far generation runs ahead of training, and which groups a batch waits for."""

    routing: Routing = Field(
        "least-work",
        description="engine that gets a request. least-work: the engine that would finish it first; prefix: an "
        "engine that runs the same prompt",
    )
    max_inflight_groups: int | None = Field(
        None,
        gt=0,
        description="largest number of prompt groups in flight; default: engine.replicas x "
        "engine.max_concurrent_requests",
    )
    max_batches_ahead: float | None = Field(
        None,
        ge=0,
        description="number of batches that generation may run ahead of training, at most async_ratio; default: "
        "async_ratio. This key limits how much is in flight; async_ratio limits how old a trajectory "
        "may become",
    )
    max_unscored: int | None = Field(
        None,
        gt=0,
        description="no group starts while so many responses wait for a score; default: no such limit, so that only "
        "max_inflight_groups bounds them",
    )
    redundant_groups: int = Field(
        0,
        ge=0,
        description="number of groups started in addition to what a batch needs; groups that are left over are "
        "issued again later",
    )
    redundant_responses: int = Field(
        0,
        ge=0,
        description="number of responses started in addition to group_size; the first group_size responses to "
        "finish are kept",
    )
    tail_batching: bool = Field(
        False,
        description="whether the prompts of slow groups are collected into batches of their own, which wait for all "
        "their responses",
    )
    max_preemptions: int | None = Field(
        None,
        gt=0,
        description="number of times that a prompt may be preempted before a batch waits for it. With tail_batching "
        "a batch of slow prompts waits (default: 1), otherwise the next batch (default: 3)",
    )
    on_stale: Literal["drop", "wait"] | None = Field(
        None,
        description="what happens to a running group that would be too old for the next batch. wait (default): the "
        "batch waits for it; drop (default with redundant_groups or tail_batching): it is dropped, and "
        "its prompt is issued again",
    )
    batch_order: Literal["finished", "started"] = Field(
        "finished", description="which groups form a batch: those that finish first, or those that started first"
    )
    staleness_from: Literal["started", "oldest-token"] = Field(
        "started",
        description="version from which a response's age is counted: the version at the start of its request, or "
        "the version of its oldest token",
    )
    filter: FilterConfig | None = None
    attempts: int = Field(3, gt=0, description="number of times that a failing request is sent before the run fails")
    patience_seconds: float = Field(
        600.0, gt=0, le=LONGEST_SECONDS, description="seconds without any progress after which the rollout stage fails"
    )

    @property
    def bound(self) -> Literal["drop", "wait"]:
        """What happens to groups of responses that are too slow for their batch: "drop" or "wait"."""
        return self.on_stale or ("drop" if self.redundant_groups or self.tail_batching else "wait")

    @property
    def leaves_behind(self) -> bool:
        """True if a running group of responses may be cancelled and started again later."""
        return self.bound == "drop" or self.tail_batching


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: before, during and after training."""

    fixed: ClassVar[Mapping[str, str]] = {
        "prompts": "it decides which prompts are held out",
        "mean": "earlier accuracies are such means",
        "correct": "earlier accuracies count such responses",
    }

    every: int = Field(
        25,
        ge=0,
        description="number of versions between two evaluations; 0: only the first and the last version are evaluated",
    )
    prompts: int = Field(256, gt=0, description="number of held-out prompts; they are never trained on")
    samples: int = Field(
        1,
        gt=0,
        description="number of responses to each held-out prompt; with more than one, pass@2, pass@4, ... are also "
        "reported",
    )
    mean: Literal["share", "responses"] = Field(
        "share",
        description='accuracy of several domains: "share" is the mean of the domains, each weighted by its share; '
        '"responses" is the mean of all responses',
    )
    correct: Literal["outcome", "value"] = Field(
        "outcome",
        description='responses that an accuracy counts: "outcome" are those whose outcome is correct; "value" are '
        "those whose reward is exactly 1, as in recorded runs that are older than this key",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="sampling temperature of evaluations; 0: greedy decoding, which gives the same response in "
        "every sample",
    )
    engine: Literal["auto", "lent", "own", "transformers"] = Field(
        "auto",
        description="engine that evaluates during training. lent: one of the run's engines; own: an additional engine "
        "like [engine]; transformers: an additional transformers engine on a CPU; auto: lent with 2 or more replicas, "
        "else own, or transformers on a CPU",
    )
