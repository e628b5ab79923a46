"""Implements `rollflow rates`: writes the pass rate of each question that a run asked, from the run's log."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.reading import iterate_written
from rollflow.tasks.run.context import RunContext


def command(options: argparse.Namespace) -> int:
    """Write the file, and print how many questions it has."""
    context = chosen_run(options)
    rows = list_rates(context)
    if not rows:
        why = "its log has no pass rates; name a run that has trained, and that this version of rollflow recorded"
        raise ConfigError(f"run {context.run_id!r}: {why}")
    try:
        with open(options.file, "x", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
    except OSError as error:
        cure = "name a new file in a folder that exists"
        raise ConfigError(f"{options.file}: it cannot be written: {error.strerror}; {cure}") from None
    print(f"{len(rows):,} questions of run {context.run_id} are in {options.file}, each with its pass_rate")
    return OK


def list_rates(context: RunContext) -> list[dict[str, Any]]:
    """List the questions that a run asked, in the order of their first group, with columns for a prompt file.

    The pass rate of a question is the share of correct responses over all its groups, trained and filtered.
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
    return [{**row, "pass_rate": row["correct"] / row["responses"]} for row in rows.values()]
