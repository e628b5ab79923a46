"""The `[rollout]` and `[evaluation]` sections: how far generation runs ahead, and how the policy is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section

Routing = Literal["least-work", "prefix"]
AnyRouting = Literal[Routing, "group"]  # "group" is a baseline


class FilterConfig(Section):
    """Dynamic sampling: groups without a learning signal are counted and replaced by groups of other prompts."""

    min_mean: float | None = Field(None, description="groups with a mean reward at or below it are not trained on")
    max_mean: float | None = Field(None, description="groups with a mean reward at or above it are not trained on")
    min_std: float | None = Field(None, ge=0, description="nor those whose rewards have this deviation or less")
    most: int = Field(1000, gt=0, description="groups filtered in a row before the run fails: nothing would be left")


class RolloutConfig(Section):
    """How far generation runs ahead, and what it waits for."""

    mode: Literal["queue", "batch"] = Field(
        "queue", description="batch: whole batches, rewards after the last response; the baseline, slower"
    )
    routing: AnyRouting = Field(
        "least-work",
        description="which engine a request goes to: the one that would be done first; prefix: one that runs the same "
        "prompt; group: a prompt holds the slots of one engine until its slowest response ends, a baseline",
    )
    depth: int | None = Field(
        None, gt=0, description="most prompt groups in flight; default: as many as keep all slots of the engines busy"
    )
    ahead: float | None = Field(
        None,
        ge=0,
        description="batches that generation may run ahead of training, at most async_ratio (the default): how much is "
        "in flight, where async_ratio is how old it may get",
    )
    extra_groups: int = Field(
        0, ge=0, description="groups started beyond a batch; those left over are issued again, later"
    )
    extra_responses: int = Field(0, ge=0, description="responses started beyond group_size; the first to end are kept")
    tail_batching: bool = Field(
        False, description="collect prompts that were too slow, and give them a batch of their own that waits for all"
    )
    tail_after: int | None = Field(
        None,
        gt=0,
        description="times a prompt is left behind before a batch waits for it: one of its own with tail_batching "
        "(default: 1), else the next one (default: 3)",
    )
    at_bound: Literal["drop", "wait"] | None = Field(
        None,
        description="what a batch does with a group that would be too old for the next one: wait for it (the default), "
        "or drop it, to be issued again (the default with extra_groups or tail_batching)",
    )
    order: Literal["finished", "started"] = Field(
        "finished", description="which groups make a batch: the first to finish, or the first that were started"
    )
    staleness: Literal["started", "oldest-token"] = Field(
        "started", description="a response's age counts from its request, or from its oldest token"
    )
    filter: FilterConfig | None = None
    attempts: int = Field(3, gt=0, description="times a request that failed is sent before the run fails")
    patience_seconds: float = Field(
        600.0, gt=0, le=LONGEST_SECONDS, description="longest wait without any progress before the stage fails"
    )

    @property
    def bound(self) -> Literal["drop", "wait"]:
        """Value of `at_bound`; by default nothing is dropped unless extra groups or tail batching leave groups over."""
        return self.at_bound or ("drop" if self.extra_groups or self.tail_batching else "wait")

    @property
    def leaves_behind(self) -> bool:
        """Whether a running group may be preempted and issued again, which means that its random draws must be kept."""
        return self.bound == "drop" or self.tail_batching


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: before, during and after training."""

    fixed: ClassVar[Mapping[str, str]] = {"prompts": "which prompts are held out follows from it"}

    every: int = Field(25, ge=0, description="versions between evaluations; 0 evaluates only before and after")
    prompts: int = Field(256, gt=0, description="held-out prompts, never trained on")
    samples: int = Field(
        1, gt=0, description="responses per held-out prompt; of more than one there is pass@2, pass@4, ... too"
    )
    temperature: float = Field(0.0, ge=0, description="0 is greedy: several samples are then one")
    engine: Literal["auto", "lent", "own", "transformers"] = Field(
        "auto",
        description="where, beside training: on one of the run's engines, lent for as long as it takes; on one of "
        "its own, like [engine]; or on one of its own of kind transformers, on a CPU. auto: lent where engine.replicas "
        "is 2 or more, else transformers in place of vLLM on a CPU, for policies that it can run, else own",
    )
