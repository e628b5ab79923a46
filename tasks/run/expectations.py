"""Builds the values that an audit expects of a stored run, from the run's config and prompts.

If prompts cannot be opened any more, for example because a file is missing, `Expected.unchecked` contains the reason.
An audit does not report prompts that cannot be opened as a violation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rollflow.storage.audit.expected import BatchLimits, Expected, ExpectedPrompts
from rollflow.storage.errors import ConfigError, Corrupt, Missing
from rollflow.storage.records import DiscardReason, Prompt
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.environments.config import MixedEnvironment, SingleTurnEnvironment
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.policies.stop import stop_tokens
from rollflow.tasks.policies.vocabulary import read_vocabulary
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.limits import filter_reason
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext, parse_recorded
from rollflow.tasks.run.user_code import changed_code

ROUNDING = 1e-6  # tolerance for the mean reward of a group of responses, because batches store rewards in float32
UNREADABLE = (ConfigError, Corrupt, Missing, OSError, ValueError, KeyError, TypeError)


def expected_of(context: RunContext) -> Expected:
    """Return the expected values with which an audit compares the stored batches of a run."""
    try:
        return Expected(_read_recorded_limits, _open_prompts(context))
    except UNREADABLE as error:
        return Expected(_read_recorded_limits, unchecked=f"prompts are not checked, because {error}")


def _read_recorded_limits(recorded: Mapping[str, Any]) -> BatchLimits:
    try:
        return read_limits(parse_recorded(recorded))
    except ValidationError as error:
        first = error.errors()[0]
        raise Corrupt(f"a config is invalid: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read_limits(config: RunConfig) -> BatchLimits:
    """Return the limits that apply to batches committed under a config."""
    rules = _loosen_filter(config.rollout.filter)
    return BatchLimits(
        sources=len(config.prompts),
        groups=config.groups,
        group_size=config.group_size,
        redundant_responses=config.rollout.redundant_responses,
        max_new_tokens=config.engine.max_new_tokens,
        judges_all=config.judges_again,
        removes=isinstance(config.environment, MixedEnvironment),
        leave_out=frozenset(name for name, one in config.scorers.items() if one.leaves_out),
        reasons=reasons_of(config),
        made_up=isinstance(config.engine, TimedEngineConfig),
        single_turn=isinstance(config.environment, SingleTurnEnvironment),
        replaces_prompts=config.environment.replaces_prompts,
        episode_tokens=config.environment.limits.max_episode_tokens
        if isinstance(config.environment, LimitedEnvironment)
        else None,
        oldest_token=config.rollout.staleness_from == "oldest-token",
        filtered=lambda rewards: filter_reason(rules, rewards),
    )


def reasons_of(config: RunConfig) -> frozenset[DiscardReason]:
    """Return the reasons for which a scheduler with this config may discard a group of responses."""
    left = DiscardReason.REDUNDANT if config.rollout.redundant_groups else DiscardReason.STALE
    # Another prompt replaces a prompt whose environment was removed.
    removes = isinstance(config.environment, MixedEnvironment)
    filtered = {DiscardReason.FILTERED} if config.rollout.filter or removes else set()
    # The environment may fail, so that no scorer can judge the episode.
    may_break = not isinstance(config.environment, SingleTurnEnvironment)
    unjudged = {DiscardReason.UNJUDGED} if config.judges_again or may_break else set()
    return frozenset({left} | filtered | unjudged)


def _loosen_filter(rules: FilterConfig | None) -> FilterConfig | None:
    """Widen the limits of the reward filter by the tolerance for rounding."""
    if rules is None:
        return None
    return rules.model_copy(
        update={
            "min_mean": None if rules.min_mean is None else rules.min_mean - ROUNDING,
            "max_mean": None if rules.max_mean is None else rules.max_mean + ROUNDING,
            "min_std": None if rules.min_std is None else max(0.0, rules.min_std - ROUNDING),
        }
    )


def _open_prompts(context: RunContext) -> ExpectedPrompts:
    prompts = context.prompts()
    _check_clock(context)
    _check_own_sources(context)

    def ask(index: int) -> tuple[Prompt, bool]:
        prompt, question = prompts.find(index)
        return prompt, prompts.is_held_out(index % len(prompts.sources), question)

    held_out = [*prompts.held_out(), *(one for found in prompts.evaluation_sets().values() for one in found)]
    return ExpectedPrompts(
        ask=ask,
        held_out={tuple(prompt.input.flat): prompt.id for prompt in held_out},
        vocabulary=read_vocabulary(context.policy_folder),
        stops=frozenset(stop_tokens(context.policy_folder)),
        propose_epoch=prompts.epochs.propose if prompts.epochs else None,
    )


def _check_clock(context: RunContext) -> None:
    """Raise `ConfigError` if the chat template shows the time, and the run did not record the shown time."""
    if context.created.single_start:
        return
    for source in context.all_configs[0].prompts:
        if source.chat and context.tokenizer.template.reads_clock(source.system):
            raise ConfigError(
                "the chat template writes the time into prompts, and this run did not record the time, so its "
                "prompts cannot be repeated"
            )


def _check_own_sources(context: RunContext) -> None:
    """Raise `ConfigError` if the code of a user-defined prompt source has changed since the run began.

    The run itself can continue with a changed source, as long as the first questions are the same.
    """
    for key in changed_code(context.all_configs[0], context.created.own_code):
        if key.startswith("prompts."):
            raise ConfigError(
                f"{key}.path: the file has changed since the run's start, so its questions cannot be repeated"
            )
