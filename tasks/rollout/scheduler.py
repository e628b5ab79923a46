"""The rollout scheduler: commits each issued prompt exactly once, either in a training batch or as discarded.

    prompts --admission--> dispatch: G x (generate -> verify) --> buffer --N groups--> commit --> channel
                ^                         |                         |
                |         failed, too slow, not needed              | stale
                +------ issued again <----+-------------------------+
                        (a filtered prompt is replaced by another prompt)

Each loop waits as follows:

- `_admit` checks after each new version, batch and finished response whether a new group may start.
- `_dispatch` waits for engines and for the scorer, and both waits have a time limit.
- `_form_batches` waits for N fresh groups of responses, for the commit, and for room in the channel.

The modules `admission` and `formation` decide, without side effects, whether a group of responses starts and whether a
batch is formed.

Each batch is committed together with all prompts that were issued and all groups that were discarded since the previous
batch. A scheduler that resumes a run issues again exactly those prompts whose groups are neither in a batch nor
discarded.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollflow.storage.batch import pack_group
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import (
    Discard,
    DiscardReason,
    FinishedGroup,
    GroupKey,
    PassRate,
    Prompt,
    TrajectoryGroup,
    UnjudgedResponse,
)
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.environments.base import Environment, find_removal
from rollflow.tasks.environments.ports import NO_PORTS, EnvironmentPorts
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.rollout import admission
from rollflow.tasks.rollout.admission import AdmissionDecision, AdmissionInputs, BatchesToForm
from rollflow.tasks.rollout.buffer import TrajectoryBuffer
from rollflow.tasks.rollout.counts import SchedulerCounts
from rollflow.tasks.rollout.formation import Formation
from rollflow.tasks.rollout.group import GroupPorts, GroupRollout
from rollflow.tasks.rollout.issue_order import Issue, IssueOrder, NextResets
from rollflow.tasks.rollout.judging import Outages, ScoreQueue
from rollflow.tasks.rollout.limits import RolloutLimits, filter_reason
from rollflow.tasks.rollout.prompt_spans import PromptSpans
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.resuming.journal import TurnJournal
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.running_by_version import RunningByVersion
from rollflow.tasks.runtime.spans import Spans
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.config import name_section


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """The functions and objects that a scheduler calls, for example to read prompts and to commit batches.

    `prompt` returns a prompt, or an awaitable if reading the prompt takes long. `commit` stores a training batch
    durably and sends the batch to the learner. `pack` encodes a group of responses for storage as soon as the group is
    complete. `start_epoch` starts an epoch of a prompt source and returns the position after the epoch's last prompt.
    `journal` stores finished turns.
    """

    prompt: Callable[[int], Prompt | Awaitable[Prompt]]
    score: Callable[[ScoreRequest], Awaitable[Score]]
    commit: Callable[[StagedBatch], Awaitable[None]]
    pack: Callable[[TrajectoryGroup], FinishedGroup] = pack_group
    environment: Environment = SINGLE_TURN
    environment_ports: EnvironmentPorts = NO_PORTS
    vocabulary: int = ANY_TOKEN  # size of the policy's vocabulary
    spans: Spans = field(default_factory=Spans)
    start_epoch: Callable[[int, int], Awaitable[int]] | None = None
    journal: TurnJournal = field(default_factory=TurnJournal)

    async def read_prompt(self, index: int) -> Prompt:
        """Return a prompt, after a wait if reading the prompt takes long."""
        found = self.prompt(index)
        return found if isinstance(found, Prompt) else await found


class RolloutScheduler:
    """Forms training batches from prompts, and commits each batch to storage."""

    def __init__(
        self, limits: RolloutLimits, ports: SchedulerPorts, proxy: InferenceProxy, resume: ResumePoint
    ) -> None:
        self.limits, self._ports, self._proxy = limits, ports, proxy
        missing = tuple(number for number in resume.missing if number < limits.batches)
        self.due = BatchesToForm(resume.number, missing, limits.batches)
        self.voids = resume.voids  # a run replaces its scheduler when another batch is voided (rejected)
        self.buffer, self.counts = TrajectoryBuffer(), SchedulerCounts()
        self._order = IssueOrder(limits, resume.cursor, resume.again, resume.behind, resume.epochs)
        self._resets = NextResets(ports.environment, limits, ports.read_prompt)
        self._redraws = dict(resume.redraws)
        self._starts = RunningByVersion()
        self._formation = Formation(limits, self.buffer, self._starts)
        self._spans = PromptSpans(ports.spans)
        self._room, self._ready = asyncio.Event(), asyncio.Event()
        self._journal = ports.journal
        self._outages = Outages()
        self.scoring = ScoreQueue(limits.max_unscored, self._room.set)
        self._group_ports = GroupPorts(
            limits,
            proxy,
            ports.score,
            self._count_response,
            self._note_start,
            ports.environment,
            ports.vocabulary,
            ports.environment_ports,
            self._spans,
            self.scoring,
            self._journal,
            self._outages,
        )
        self._running: dict[GroupKey, GroupRollout] = {}  # running groups of responses, in the order of their start
        self._issued = 0
        self._left_behind: set[GroupRollout] = set()  # preempted groups of responses that have not ended yet
        self._generating = 0  # number of unfinished responses of all running groups of responses
        self._had_room = True  # False if the engines had no free slot at the last decision of admission
        self._discards: list[Discard] = []
        self._filtered_rates: list[PassRate] = []  # pass rates of the filtered groups in `_discards`
        self._unjudged: list[UnjudgedResponse] = []  # unjudged responses of the groups in `_discards`
        self._filtered_in_a_row = 0
        self._unjudged_of = Counter[int]()  # prompt -> number of consecutive unjudged groups
        # newest published policy version, which is the number of the learner's next batch
        self._published = proxy.version
        self._aborts: set[asyncio.Task[None]] = set()
        proxy.on_change = self.wake
        self._order.advance(proxy.version)

    @property
    def number(self) -> int:
        """Number of the next training batch that was never formed."""
        return self.due.number

    @property
    def running(self) -> int:
        """Number of groups of responses that are unfinished or not scored yet."""
        return len(self._running)

    def note_published(self, version: int) -> None:
        """Record a published policy version, after which the learner is ready for another batch."""
        self._published = max(self._published, version)
        self._ready.set()

    def wake(self) -> None:
        """Check again whether groups of responses may start, because an engine was updated or has joined."""
        self._order.advance(self._proxy.version)
        self.note_published(self._proxy.version)
        self._room.set()

    async def run(self) -> None:
        """Form all `limits.batches` training batches, then wait until all running groups of responses have ended."""
        async with asyncio.TaskGroup() as tasks:
            loops = self._admit(tasks), self._resets.run(self._order, self._running), self._journal.run()
            endless = [tasks.create_task(loop) for loop in loops]
            await self._form_batches()
            self._outages.end_pauses()
            for task in endless:
                task.cancel()

    # --- starting groups ------------------------------------------------------------------------------------

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start the groups of responses that admission allows, and check again after each change."""
        while True:
            await self._start_groups(tasks)
            await self._room.wait()
            self._room.clear()

    async def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        while (room := self._decide_admission()).opens:
            if (missing := self._order.find_missing_epoch()) is None:
                self._start(room.batch, tasks)
            else:
                assert self._ports.start_epoch is not None, "a source skips solved questions"
                self._order.note_epoch(missing[0], await self._ports.start_epoch(*missing))
        self._had_room = room.free
        self._resets.note_admission(room.wanted)
        now = asyncio.get_running_loop().time()
        self.counts.held.note(now, holds=room.is_held)
        self.counts.backlogged.note(now, holds=room.is_backlogged)

    def _decide_admission(self) -> AdmissionDecision:
        supply = self._read_supply()
        return admission.decide_admission(
            supply, self.limits, self._order.count_extra_groups(admission.next_batch(supply, self.limits))
        )

    def _read_supply(self) -> AdmissionInputs:
        return AdmissionInputs(
            version=self._proxy.version,
            due=self.due,
            running=len(self._running),
            outstanding=len(self._running) - len(self._left_behind) + len(self.buffer),
            generating=self._generating,
            slots=self._slots,
            unscored=self.scoring.waiting,
        )

    @property
    def _slots(self) -> float:
        """Largest number of generation requests that may be in flight."""
        return math.inf if self.limits.slots is None else min(self.limits.slots, self._proxy.capacity)

    def _start(self, batch: int, tasks: asyncio.TaskGroup) -> None:
        issue = self._order.next_issue(batch)
        self._issued += 1
        self._spans.start(issue.key)
        rollout = self._create_rollout(issue)
        self._running[issue.key] = rollout
        self._generating += issue.responses
        tasks.create_task(self._dispatch(rollout))

    def _create_rollout(self, issue: Issue) -> GroupRollout:
        redraws = self._redraws.get(issue.key.prompt, 0)
        return GroupRollout(
            issue.key, self._group_ports, issue.responses, self._issued, awaited=issue.awaited, redraws=redraws
        )

    # --- running groups -------------------------------------------------------------------------------------

    async def _dispatch(self, rollout: GroupRollout) -> None:
        """Run one group of responses, then put the group into the buffer or discard it."""
        prompt = await self._ports.read_prompt(rollout.key.prompt)
        self._note_removal(prompt, rollout.key.prompt)
        ended = await rollout.run(prompt)
        del self._running[rollout.key]
        self._left_behind.discard(rollout)
        self._starts.remove(rollout)
        self._free_requests(rollout.unanswered)
        if isinstance(ended, TrajectoryGroup):
            self._outages.end(prompt.scorer)
            self._unjudged_of.pop(rollout.key.prompt, None)
            self._add_scored(ended, rollout)
        else:
            self._discard(ended)
            self._check_judged(ended, prompt.scorer, rollout)
        self._ready.set()

    def _note_removal(self, prompt: Prompt, number: int) -> None:
        """Record whether the environment of an issued prompt is removed. Prompts are counted when they begin, because
        prompts that are played end long after prompts of a removed environment.
        """
        if why := find_removal(self._group_ports.environment, prompt):
            self._order.note_removed(number, why)
        else:
            self._order.note_playable(number)

    def _check_judged(self, discard: Discard, scorer: str, rollout: GroupRollout) -> None:
        """Raise `ConfigError` after too many groups of responses in a row could not be judged by a scorer."""
        unjudged = rollout.unjudged
        if discard.reason not in (DiscardReason.UNJUDGED, DiscardReason.FILTERED) or unjudged is None:
            return
        self._unjudged.append(unjudged)
        if discard.reason is DiscardReason.FILTERED:  # the environment of the prompt is removed
            self.counts.filtered["removed environment"] += 1
            return
        prompt, most = discard.key.prompt, self.limits.judging_of(scorer).max_unjudged
        self._unjudged_of[prompt] += 1
        if self._unjudged_of[prompt] == most:
            raise ConfigError(
                f"{name_section(scorer)}.max_unjudged = {most}: prompt {prompt} was issued {most} times without a "
                f"score for its responses (the last reason: {unjudged.why}); fix the scorer, or remove the "
                "prompt, then resume the run"
            )
        if self._outages.count(scorer, rollout.number, self._issued) == most:
            raise ConfigError(
                f"{name_section(scorer)}.max_unjudged = {most}: in {most} groups in a row, a response could not "
                f"be scored (the last reason: {unjudged.why}); fix the scorer, then resume the run"
            )

    async def _count_response(self, tokens: int) -> None:
        """Count a response that ended."""
        self.counts.tokens += tokens
        self._free_requests(1)

    def _free_requests(self, responses: int) -> None:
        """Count these responses as finished, and check again whether groups of responses may start."""
        self._generating -= responses
        if self._had_room or self._generating < self._slots:  # otherwise nothing changes
            self._room.set()

    def _note_start(self, rollout: GroupRollout, version: int) -> None:
        """Record the policy version under which a group started; preempt a group that is too old for every batch."""
        if rollout not in self._left_behind:
            self._starts.add(version, rollout)
            if self.due.count and version < self._formation.oldest_allowed(self.due.first):
                self._give_up(rollout)

    def _add_scored(self, group: TrajectoryGroup, rollout: GroupRollout) -> None:
        """Put a complete group of responses into the buffer, unless the group is filtered or too old."""
        self.counts.surplus_tokens += group.surplus_tokens
        why = filter_reason(self.limits.filter, group.episode_rewards)
        if why is not None:
            self._discard_filtered(group, why)
        elif group.started_version < self._formation.oldest_allowed(self.due.first):
            self._discard_stale(group)
        else:
            self._filtered_in_a_row = 0
            self.buffer.add(self._ports.pack(group), rollout.number, awaited=rollout.awaited)
            self.counts.trajectories += group.episodes
            self._spans.complete(group.key)

    def _discard_filtered(self, group: TrajectoryGroup, why: str) -> None:
        self.counts.filtered[why] += 1
        self._filtered_in_a_row += 1
        self._filtered_rates += [] if group.pass_rate is None else [group.pass_rate]
        self._unjudged += group.left_out
        self._discard(Discard(group.key, DiscardReason.FILTERED, group.started_version, group.response_tokens))
        if self.limits.filter and self._filtered_in_a_row >= self.limits.filter.max_consecutive:
            raise ConfigError(  # The run fails, because the same prompts would be filtered again after a restart.
                f"rollout.filter removed {self._filtered_in_a_row} groups in a row (the last group: {why}); "
                "widen the filter, or choose prompts that this policy sometimes answers correctly"
            )

    def _discard_stale(self, group: FinishedGroup) -> None:
        self._discard(Discard(group.key, self._too_slow, group.started_version, group.response_tokens))

    def _discard(self, discard: Discard) -> None:
        self._discards.append(discard)
        self.counts.discards[discard.reason] += 1
        self.counts.discarded_tokens += discard.response_tokens
        self.counts.dropped_tokens += discard.response_tokens if discard.slow else 0
        self._order.note_discard(discard)
        self._spans.discard(discard)

    # --- forming batches ------------------------------------------------------------------------------------

    async def _form_batches(self) -> None:
        """Form and commit one training batch after another."""
        while self.due.count:
            if (staged := self._stage_batch()) is not None:
                await self._ports.commit(staged)
                self._spans.commit(staged)
                await self._journal.close_groups(staged.ended_groups)
            else:
                await self._ready.wait()
                self._ready.clear()

    def _stage_batch(self) -> StagedBatch | None:
        """Take the groups of responses for the next batch from the buffer; return None if the batch has to wait."""
        number = self.due.first
        waits = self._formation.is_full and self._must_wait(number)
        self.counts.waited.note(asyncio.get_running_loop().time(), holds=waits and number <= self._published)
        if not self._formation.is_full or waits:
            return None
        groups = self.buffer.take(self.limits.groups, in_order=self.limits.batch_order == "started")
        self._advance()
        discards, self._discards = tuple(self._discards), []
        rates, self._filtered_rates = tuple(self._filtered_rates), []
        unjudged, self._unjudged = tuple(self._unjudged), []
        self._order.forget_slowness(group.key.prompt for group in groups)
        return StagedBatch(number, groups, self._order.take_issued(), discards, rates, unjudged)

    def _must_wait(self, number: int) -> bool:
        running = (rollout.number for rollout in self._running.values() if rollout not in self._left_behind)
        return self._formation.must_wait(
            number, running, learner_is_busy=number > self._published, is_lost=bool(self.due.missing)
        )

    def _advance(self) -> None:
        """Move on to the next batch, and drop or preempt the groups of responses that are too old for that batch."""
        self.due = self.due.after_first()
        bound = self._formation.oldest_allowed(self.due.first)
        for group in self.buffer.drop(bound):
            self._discard_stale(group)
        if self.due.count:
            for rollout in self._starts.list_before(bound):
                self._give_up(rollout)
        self._room.set()

    def _give_up(self, rollout: GroupRollout) -> None:
        self._starts.remove(rollout)
        self._left_behind.add(rollout)
        task = asyncio.create_task(rollout.give_up(self._too_slow))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    @property
    def _too_slow(self) -> DiscardReason:
        """Reason for discarding a slow group of responses: REDUNDANT with `redundant_groups`, otherwise STALE."""
        return DiscardReason.REDUNDANT if self.limits.redundant_groups else DiscardReason.STALE
