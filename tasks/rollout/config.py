"""Defines the sections `[rollout]` and `[evaluation]` of a run's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section

Routing = Literal["least-work", "prefix"]
DurableTurns = Literal["off", "background", "before-action"]
SNAPSHOT_BYTES, LARGEST_SNAPSHOT = 1 << 18, 1 << 23  # default and upper limit of the key `max_snapshot_bytes`


class FilterConfig(Section):
    """Dynamic sampling: prompts whose responses have rewards that teach nothing are replaced by other prompts."""

    min_mean: float | None = Field(
        None,
        description="a prompt is filtered out as too hard if the mean reward of its responses is this number or "
        "less; default: no prompt is too hard",
    )
    max_mean: float | None = Field(
        None,
        description="a prompt is filtered out as too easy if the mean reward of its responses is this number or "
        "more; default: no prompt is too easy",
    )
    min_std: float | None = Field(
        None,
        ge=0,
        description="a prompt is filtered out if the standard deviation of its responses' rewards is this number or "
        "less; 0: a prompt is filtered out if all its responses have the same reward; default: no limit",
    )
    max_consecutive: int = Field(
        1000,
        gt=0,
        description="the run fails after this number of consecutive prompts was filtered out",
    )


class RolloutConfig(Section):
    """How far generation runs ahead of training, and which responses a batch waits for."""

    routing: Routing = Field(
        "least-work",
        description="rule that chooses the engine for a request. least-work: the engine that would finish the "
        "request first; prefix: an engine that already runs another response to the same prompt",
    )
    admit_by: Literal["slots", "kv"] = Field(
        "slots",
        description="what limits the number of episodes that run on the engines. slots: "
        "engine.max_concurrent_requests alone; kv: also the size of the KV caches, so that a cache keeps the earlier "
        "turns of each running episode",
    )
    max_inflight_groups: int | None = Field(
        None,
        gt=0,
        description="largest number of prompts whose responses are generated or scored at the same time; default: "
        "engine.replicas x engine.max_concurrent_requests",
    )
    max_batches_ahead: float | None = Field(
        None,
        ge=0,
        description="number of batches by which generation may run ahead of training, at most async_ratio; default: "
        "async_ratio. max_batches_ahead limits how many prompts are started; async_ratio limits how old a response "
        "may become",
    )
    max_unscored: int | None = Field(
        None,
        gt=0,
        description="no further prompt is started while at least this number of responses waits for a score; "
        "default: only max_inflight_groups limits the number of waiting responses",
    )
    redundant_groups: int = Field(
        0,
        ge=0,
        description="number of prompts that are started in addition to those that a batch needs; prompts whose "
        "responses are not used are started again later",
    )
    redundant_responses: int = Field(
        0,
        ge=0,
        description="number of responses that are started for each prompt in addition to group_size; the first "
        "group_size responses that finish are kept, and the others are aborted",
    )
    tail_batching: bool = Field(
        False,
        description="whether prompts with slow responses are collected into separate batches, which wait for all "
        "responses to these prompts",
    )
    max_preemptions: int | None = Field(
        None,
        gt=0,
        description="how often the responses to a prompt may be discarded as too slow. After that, a batch waits for "
        "them; default: 3, or 1 with tail_batching, where a batch of slow prompts waits",
    )
    on_stale: Literal["drop", "wait"] | None = Field(
        None,
        description="what happens to running responses that would be too old for the next batch. wait (default): "
        "the batch waits for them; drop (default with redundant_groups or tail_batching): they are discarded and "
        "generated again later",
    )
    batch_order: Literal["finished", "started"] = Field(
        "finished",
        description="which prompts form a batch. finished: those whose responses finish first; started: those that "
        "were started first",
    )
    staleness_from: Literal["started", "oldest-token"] = Field(
        "started",
        description="policy version from which the staleness of a response is counted. started: the policy version "
        "at the start of its request; oldest-token: the policy version that sampled the oldest token of the response",
    )
    filter: FilterConfig | None = None
    attempts: int = Field(
        3,
        gt=0,
        description="number of times that a failing request to an engine is sent before the run fails; 1: no "
        "request is repeated",
    )
    durable_turns: DurableTurns = Field(
        "background",
        description="when a finished turn of an episode with several turns is stored, so that the episode continues "
        "after a crash. background: while the episode continues; before-action: before the environment receives the "
        "turn; off: never",
    )
    max_snapshot_bytes: int = Field(
        SNAPSHOT_BYTES,
        gt=0,
        le=LARGEST_SNAPSHOT,
        description="largest size in bytes of a snapshot that an environment stores after a turn; a larger snapshot is "
        "not stored, and a warning says so",
    )
    patience_seconds: float = Field(
        600.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="the rollout stage fails after this number of seconds without any progress",
    )

    @property
    def bound(self) -> Literal["drop", "wait"]:
        """What happens to groups of responses that are too slow for their batch: "drop" or "wait"."""
        return self.on_stale or ("drop" if self.redundant_groups or self.tail_batching else "wait")

    @property
    def leaves_behind(self) -> bool:
        """True if a running group of responses may be cancelled, so that its prompt is started again later."""
        return self.bound == "drop" or self.tail_batching


class EvaluationConfig(Section):
    """How the policy is evaluated on held-out prompts before, during and after training."""

    fixed: ClassVar[Mapping[str, str]] = {
        "prompts": "it decides which prompts are held out",
        "mean": "earlier accuracies are such means",
        "correct": "earlier accuracies count such responses",
    }

    every: int = Field(
        25,
        ge=0,
        description="number of policy versions between two evaluations; 0: only the first and the last policy "
        "version are evaluated",
    )
    prompts: int = Field(
        256,
        gt=0,
        description="number of held-out prompts that each evaluation asks; the policy is never trained on held-out "
        "prompts",
    )
    samples: int = Field(
        1,
        gt=0,
        description="number of responses to each held-out prompt in an evaluation; with 2 or more, the metrics "
        "pass@2, pass@4, ... are also reported",
    )
    mean: Literal["share", "responses"] = Field(
        "share",
        description="how the accuracy over several prompt sources is computed. share: mean of the accuracies of the "
        "sources, each weighted by the key prompts.share of the source; responses: mean over all responses",
    )
    correct: Literal["outcome", "value"] = Field(
        "outcome",
        description="which responses count as correct in an accuracy. outcome: responses that the scorer marks as "
        "correct; value: responses whose reward is exactly 1, as in recorded runs that are older than this key",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="sampling temperature of evaluations; 0: greedy decoding, which gives the same response in "
        "every sample",
    )
    engine: Literal["auto", "lent", "own", "transformers"] = Field(
        "auto",
        description="engine that runs the evaluations during training. lent: one of the run's engines; own: an extra "
        "engine like [engine]; transformers: an extra transformers engine on a CPU; auto: lent with 2 or more "
        "replicas, otherwise an extra engine",
    )
