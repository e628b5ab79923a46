"""The `[rollout]` and `[evaluation]` sections: how far generation runs ahead, and how the policy is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section

Routing = Literal["least-work", "prefix"]


class FilterConfig(Section):
    """Dynamic sampling: groups without a learning signal are counted and replaced by groups of other prompts."""

    min_mean: float | None = Field(None, description="groups with a mean reward at or below this are not trained on")
    max_mean: float | None = Field(None, description="groups with a mean reward at or above this are not trained on")
    min_std: float | None = Field(
        None, ge=0, description="groups whose rewards have this standard deviation or less are not trained on"
    )
    max_consecutive: int = Field(
        1000,
        gt=0,
        description="consecutive filtered groups after which the run fails: the prompts give nothing to learn from",
    )


class RolloutConfig(Section):
    """How far generation runs ahead of training, and for what generation waits."""

    routing: Routing = Field(
        "least-work",
        description="engine that a request goes to. least-work: the one that would finish it first; prefix: one that "
        "runs the same prompt",
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
        description="batches that generation may run ahead of training; at most async_ratio, which is the default. It "
        "limits how much is in flight; async_ratio limits how old it may become",
    )
    redundant_groups: int = Field(
        0, ge=0, description="groups started beyond what a batch needs; those left over are issued again later"
    )
    redundant_responses: int = Field(
        0, ge=0, description="responses started beyond group_size; the first group_size to finish are kept"
    )
    tail_batching: bool = Field(
        False,
        description="collect the prompts of slow groups into batches of their own, which wait for all their responses",
    )
    max_preemptions: int | None = Field(
        None,
        gt=0,
        description="times that a prompt may be preempted before a batch waits for it: a batch of slow prompts with "
        "tail_batching (default: 1), else the next batch (default: 3)",
    )
    on_stale: Literal["drop", "wait"] | None = Field(
        None,
        description="what a batch does with a running group that would be too old for the next batch: wait for it "
        "(the default), or drop it and issue its prompt again (the default with redundant_groups or "
        "tail_batching)",
    )
    batch_order: Literal["finished", "started"] = Field(
        "finished", description="groups that form a batch: the first to finish, or the first to be started"
    )
    staleness_from: Literal["started", "oldest-token"] = Field(
        "started",
        description="version that a response's age counts from: the one at the start of its request, or that of its "
        "oldest token",
    )
    filter: FilterConfig | None = None
    attempts: int = Field(3, gt=0, description="times that a failing request is sent before the run fails")
    patience_seconds: float = Field(
        600.0, gt=0, le=LONGEST_SECONDS, description="seconds without any progress after which the rollout stage fails"
    )

    @property
    def bound(self) -> Literal["drop", "wait"]:
        """Value of `on_stale`; by default groups are dropped only with extra groups or tail batching."""
        return self.on_stale or ("drop" if self.redundant_groups or self.tail_batching else "wait")

    @property
    def leaves_behind(self) -> bool:
        """True if a running group may be preempted and issued again; then the group's random draws must be repeated."""
        return self.bound == "drop" or self.tail_batching


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: before, during and after training."""

    fixed: ClassVar[Mapping[str, str]] = {"prompts": "which prompts are held out follows from it"}

    every: int = Field(
        25, ge=0, description="versions between two evaluations; 0: only the first and the last version are evaluated"
    )
    prompts: int = Field(256, gt=0, description="number of held-out prompts, which are never trained on")
    samples: int = Field(
        1,
        gt=0,
        description="responses to each held-out prompt; with more than one, pass@2, pass@4, ... are reported, too",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="sampling temperature of evaluations; 0 is greedy, with the same response in every sample",
    )
    engine: Literal["auto", "lent", "own", "transformers"] = Field(
        "auto",
        description="engine that evaluates during training. lent: one of the run's engines, for as long as an "
        "evaluation takes; own: another engine like [engine]; transformers: another engine of that kind, "
        "on a CPU; auto: lent with engine.replicas of 2 or more, else own, but on a CPU transformers in "
        "place of vLLM if it can run the policy",
    )
