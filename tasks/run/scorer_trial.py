"""Tries user-defined scorers on correct answers before a run begins, to find errors such as a wrong column name."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.environments.config import SingleTurnEnvironment
from rollflow.tasks.objectives.token_rewards import check_token_rewards
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.scorers import build_scorer
from rollflow.tasks.scorers.base import FAILED, Score, ScoreRequest
from rollflow.tasks.scorers.config import (
    CompositeReward,
    ImportReward,
    RewardConfig,
    name_part,
    name_section,
    split_scorer,
)

# number of prompts that are read to find prompts for each scorer, and number of answers that each scorer is tried on
SEEN, TRIED = 64, 3


def try_own_scorers(config: RunConfig, prompts: RunPrompts, tokenizer: PolicyTokenizer) -> list[str]:
    """Let each user-defined scorer score the correct answers to its first questions; return notes for the user.

    The scorers of an environment are not tried, because an environment may change the reference answers.

    Raises:
        ConfigError: a scorer fails on every answer, and the message says how; or a scorer gives values to tokens, and
            the run's objective cannot use them.
    """
    own = [(name, *found) for name, reward in config.scorers.items() for found in _list_tried(name, reward)]
    if not own or not isinstance(config.environment, SingleTurnEnvironment):
        return []
    found, notes = [prompts.find(index) for index in range(SEEN)], list[str]()
    for name, section, reward in own:
        asked = [(prompt, question.answer) for prompt, question in found if prompt.scorer == name and question.answer]
        if asked:
            # The scorers run in a separate thread, because the caller may be in an event loop.
            with ThreadPoolExecutor(1) as pool, _silence():
                scores = pool.submit(asyncio.run, _score(section, reward, asked[:TRIED], tokenizer)).result()
            notes += _describe_failures(section, reward, asked[0][0], scores)
            if any(score.has_token_values for score in scores):
                check_token_rewards(config.train.objective)
    return notes


def _list_tried(name: str, reward: RewardConfig) -> list[tuple[str, RewardConfig]]:
    """Return the scorers to try, with their config sections: a whole scorer, or only its user-defined parts if another
    part is a judge or a reward model.
    """
    section = name_section(name)
    if isinstance(reward, CompositeReward) and reward.is_mixed:
        parts = {name_part(section, part): scorer for part, scorer in reward.part_scorers.items()}
        return [(place, scorer) for place, scorer in parts.items() if isinstance(scorer, ImportReward)]
    is_own = any(isinstance(scorer, ImportReward) for scorer in split_scorer(section, reward).values())
    return [(section, reward)] if is_own else []


async def _score(
    section: str, reward: RewardConfig, asked: Sequence[tuple[Prompt, str]], tokenizer: PolicyTokenizer
) -> list[Score]:
    """Score the answers one after another, each within the deadline of the scorer."""
    scorer = build_scorer(reward, tokenizer.folder, section)
    await scorer.start()
    try:
        requests = [ScoreRequest(tokenizer.encode_response(said), prompt.reference) for prompt, said in asked]
        return await scorer.score(requests)
    finally:
        await scorer.close()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard the output of worker processes, such as warnings that an exception in the user's function causes."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _has_failed(score: Score) -> bool:
    """Return whether the scorer raised an error instead of computing a score."""
    return score.value <= 0 and FAILED in score.reason and score.outcome is not Outcome.UNJUDGED


def _describe_failures(section: str, reward: RewardConfig, prompt: Prompt, scores: Sequence[Score]) -> list[str]:
    """Return a note if no answer could be judged; raise `ConfigError` if the scorer raised an error on every answer."""
    said = scores[0].reason
    key = f"{section}.path = {reward.path!r}" if isinstance(reward, ImportReward) else f"{section}.kind = 'composite'"
    which = f"the right answers to the first {len(scores)} questions"
    if all(_has_failed(score) for score in scores):
        columns = ", ".join(map(repr, prompt.reference))
        raise ConfigError(f"{key}: it failed on {which} ({said}); correct it (a reference has the keys {columns})")
    if all(score.outcome in (Outcome.UNJUDGED, Outcome.TIMEOUT) for score in scores):
        return [f"{key}: {which} were not judged ({said})"]
    return []
