"""Makes a run whose source skips solved questions, with real prompts, log and epochs, and with artificial responses and
versions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rollflow.storage.records import Outcome, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.run.context import RunContext
from tests.support.log_actors import Learner
from tests.support.small_run import GROUPS, batch, prepare_small

BATCHES, QUESTIONS = 20, 9


def make_epoch_run(home: Path) -> RunContext:
    """Make a run of some epochs with nine questions. Questions with an even number are solved whenever they are
    asked.
    """
    file = home / "questions.jsonl"
    rows = ({"question": f"What is {one} plus {one}?", "answer": str(2 * one)} for one in range(12))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"kind": "jsonl", "path": str(file), "held_out": 0.25, "solved_every": 3}
    context = prepare_small(home, "epochs", BATCHES, prompts=[source])
    supervisor = context.log.claim("supervisor")
    learner, writer = Learner(context.store, supervisor.claim), context.log.claim("scheduler")
    prompts = context.prompts()
    assert prompts.epochs is not None
    learner.publish()
    for number in range(BATCHES):
        for position in range(number * GROUPS, number * GROUPS + GROUPS + 1):
            prompts.epochs.start(writer, 0, position)
        staged = batch(context, number)
        context.batches.commit(writer, replace(staged, groups=judged(context, staged)))
        learner.log.follow()
        learner.publish()
    for log in (context.log, learner.log):
        log.settle()
    return context


def judged(context: RunContext, staged: StagedBatch) -> tuple[TrajectoryGroup, ...]:
    """Judge the responses: all are correct if the question has an even number, otherwise none."""
    prompts, groups = context.prompts(), []
    for group in staged.groups:
        assert isinstance(group, TrajectoryGroup)
        assert prompts.epochs is not None
        epoch, place = divmod(prompts.epochs.locate(0, group.key.prompt), QUESTIONS)
        solved = prompts.sources[0].order(epoch)[place] % 2 == 0  # type: ignore[attr-defined]
        outcome = Outcome.CORRECT if solved else Outcome.WRONG
        rows = tuple(replace(one, outcome=outcome, reward=float(solved)) for one in group.trajectories)
        groups.append(replace(group, trajectories=rows))
    return tuple(groups)
