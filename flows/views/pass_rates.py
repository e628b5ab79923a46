"""Reads from a run's log which questions the policy was asked, and the share of correct responses to each question."""

from __future__ import annotations

from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.reading import iterate_written
from rollflow.tasks.run.context import RunContext


def list_rates(context: RunContext) -> list[dict[str, Any]]:
    """List the questions that a run's policy was asked, in the order in which they were first asked. The columns of the
    list are those of a prompt file.

    The pass rate of a question is the share of correct responses over all its groups of responses, including groups
    that were not trained on.

    Raises:
        ConfigError: the log of the run has no pass rates.
    """
    prompts, log = context.prompts(), context.log
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for record in iterate_written(log, 0, log.state.n):
        for rate in record.entry.body.rates if isinstance(record.entry.body, BatchCommitted) else ():
            question, source = prompts.question(rate.prompt), rate.prompt % len(prompts.sources)
            columns = {name: value for name, value in question.reference.items() if value is not None}
            asked = {"question": list(question.messages) or question.text, "answer": question.answer}
            row = rows.setdefault((source, question.text), {**columns, **asked, "correct": 0, "responses": 0})
            row["correct"] += rate.correct
            row["responses"] += rate.responses
    if not rows:
        why = "its log has no pass rates; name a run that has trained, and that this version of rollflow recorded"
        raise ConfigError(f"run {context.run_id!r}: {why}")
    return [{**row, "pass_rate": row["correct"] / row["responses"]} for row in rows.values()]
