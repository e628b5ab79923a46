"""Defines the log's rules for an issued prompt: its group of responses is either discarded, or committed in a batch and
trained on.
"""

from __future__ import annotations

from collections import Counter

from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.state import CommittedBatch, EntryRefused, RunState, RunTotals
from rollflow.storage.records import Discard, DiscardReason


def issue_prompt(s: RunState, prompt: int) -> None:
    """Record that a prompt was sent to the engines for the first time; the prompt must be the next one of its
    source."""
    source, sources = prompt % len(s.issued), len(s.issued)
    if prompt != s.issued[source] * sources + source:
        raise EntryRefused(
            f"prompt {prompt} cannot be issued now, because it is not the next prompt of source {source}"
        )
    if source in s.epochs and s.issued[source] >= s.epochs[source].end:
        raise EntryRefused(
            f"prompt {prompt} cannot be issued yet, because it is beyond the newest epoch of source {source}"
        )
    s.issued[source] += 1
    s.open[prompt] = 0


def close_dispatch(s: RunState, prompt: int, attempt: int) -> None:
    """Remove a prompt from the prompts in flight, because the prompt's group of responses was committed or
    discarded."""
    if s.open.get(prompt) != attempt:
        raise EntryRefused(
            f"attempt {attempt} of prompt {prompt} is not open: it was never issued, or has ended already"
        )
    del s.open[prompt]


def follow_discard(s: RunState, discard: Discard) -> None:
    """Start the next attempt for a prompt whose group of responses was discarded, or count the prompt as filtered."""
    prompt = discard.key.prompt
    if discard.reason.issued_again:
        s.open[prompt] = discard.key.attempt + 1
        if discard.slow:
            s.behind[prompt] = s.behind.get(prompt, 0) + 1
    else:
        s.filtered[prompt % len(s.filtered)] += 1
        s.behind.pop(prompt, None)
        s.redraws.pop(prompt, None)


def count_trained(totals: RunTotals, number: int, batch: CommittedBatch) -> None:
    """Add the groups of batch `number`, which a policy version was trained on, to the run's totals."""
    for group in batch.groups:
        totals.count("trained", group.tokens)
        totals.staleness[number - group.started] += 1
    totals.surplus_tokens += batch.surplus_tokens
    totals.rows += batch.rows


def check_rates(s: RunState, body: BatchCommitted) -> None:
    """Check that each pass rate in a batch's log entry is possible, and belongs to a group that the entry commits or
    filters.
    """
    if not body.rates:
        return
    filtered = [one.key for one in body.discards if one.reason is DiscardReason.FILTERED]
    ended = {*filtered, *(group.key for group in body.groups)}
    finished = Counter(key.prompt for key in ended)
    left_out = Counter(one.prompt for one in body.unjudged if one.key in ended)
    possible = all(
        0 <= rate.correct <= rate.responses == s.group_size - left_out[rate.prompt] > 0 for rate in body.rates
    )
    if not possible or not Counter(rate.prompt for rate in body.rates) <= finished:
        raise EntryRefused(f"the log entry of batch {body.number} contains pass rates that are not those of its groups")
