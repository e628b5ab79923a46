"""Scorers, which compute the rewards of responses. The module `base` defines the interface of scorers, and each kind of
scorer has its own module.

    verifier     a function that scores texts: `exact`, `reasoning_gym`, those in `text`, or user-defined (`imported`)
    pool         runs a verifier for one response after another, in worker processes
    concurrent   runs a verifier for several responses at a time, in worker processes
    judge        asks a language model behind an OpenAI-compatible endpoint
    routed       sends each response to the scorer that its prompt names
    model        a reward model, with copies in Ray actors
    composite    several scorers, whose scores are the parts of one score
    versioned    adds the scorer's version to its scores, for scorers without worker processes
    second_verdicts    scores a share of the responses a second time, to count how often the scores differ
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollflow.storage.errors import ConfigError
from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.storage.run_records.judge_usage import JudgeUsage
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts
from rollflow.tasks.scorers.base import Scorer
from rollflow.tasks.scorers.config import (
    ChoiceReward,
    CodeReward,
    CompositeReward,
    ExactReward,
    ImportReward,
    InstructionsReward,
    MathsReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
    find_deadline_part,
    has_adaptive_deadlines,
    name_part,
    name_section,
)
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.verifier import Verifier

if TYPE_CHECKING:
    from rollflow.tasks.scorers.model.copies import ModelCopies

FindCopies = Callable[[str], "ModelCopies | None"]


def build_scorers(
    configs: Mapping[str, RewardConfig],
    policy_folder: Path,
    copies: FindCopies = lambda section: None,
    anchors: Mapping[str, CaseAnchors] | None = None,
    counts: Mapping[str, SecondVerdictCounts] | None = None,
    usages: Mapping[str, JudgeUsage] | None = None,
) -> Scorer:
    """Build all scorers of a run (`RunConfig.scorers`) as one scorer, without starting it.

    Args:
        copies: A function that returns the copies of a reward model, given its config section; if the function returns
        None, the reward model is loaded in this process.
        anchors: Measured program times that decide the adaptive deadlines of test cases, by the name of the scorer.
        counts: Counts of second verdicts by scorer name, for scorers that judge a share of their responses again.
        usages: The tokens that each judge has used in earlier processes of the run, by the judge's config section.

    Raises:
        ConfigError: a user-defined function does not exist on this machine.
    """
    scorers = {
        name: build_scorer(config, policy_folder, name_section(name), copies, (anchors or {}).get(name), usages)
        for name, config in configs.items()
    }
    scorers = {name: _add_version(scorer, configs[name], name_section(name)) for name, scorer in scorers.items()}
    if counts:
        from rollflow.tasks.scorers.second_verdicts import SecondVerdictScorer

        for name, of_scorer in counts.items():
            share, deadline_part = configs[name].second_verdict_share, find_deadline_part(configs[name])
            scorers[name] = SecondVerdictScorer(scorers[name], share, of_scorer, deadline_part)
    if len(scorers) == 1:
        return next(iter(scorers.values()))
    from rollflow.tasks.scorers.routed import RoutedScorer

    return RoutedScorer(scorers)


def _add_version(scorer: Scorer, config: RewardConfig, section: str) -> Scorer:
    """Return the scorer, wrapped so that each score has the scorer's version. Worker pools are returned unchanged,
    because their worker processes report the version.
    """
    from rollflow.tasks.scorers.version import compute_version
    from rollflow.tasks.scorers.versioned import VersionedScorer
    from rollflow.tasks.scorers.worker_pool import WorkerPool

    return scorer if isinstance(scorer, WorkerPool) else VersionedScorer(scorer, compute_version(config, section))


def build_scorer(
    config: RewardConfig,
    policy_folder: Path,
    section: str = "reward",
    copies: FindCopies = lambda section: None,
    anchors: CaseAnchors | None = None,
    usages: Mapping[str, JudgeUsage] | None = None,
) -> Scorer:
    """Build the scorer that the config section `[section]` describes, without starting it.

    Responses are decoded with the tokenizer in `policy_folder`. The other arguments are as in `build_scorers`, but
    `anchors` belongs to this scorer only.

    Raises:
        ConfigError: the user-defined function that the section names does not exist on this machine.
    """
    if isinstance(config, JudgeReward):
        from rollflow.tasks.scorers.judge.scorer import JudgeScorer

        return JudgeScorer(config, policy_folder, section, (usages or {}).get(section))
    from rollflow.tasks.scorers.concurrent import ConcurrentPool
    from rollflow.tasks.scorers.pool import RewardPool

    if isinstance(config, ModelReward):
        return _build_model_scorer(config, policy_folder, section, copies(section))
    if isinstance(config, CompositeReward) and config.is_mixed:
        return _build_composite_scorer(config, policy_folder, section, copies, anchors, usages)
    # Importing a user-defined verifier here reports a failed import before any worker process starts.
    if (
        isinstance(config, ImportReward | CodeReward | CompositeReward)
        and (verifier := build_verifier(config, section)).scores_several
    ):
        return ConcurrentPool(config, policy_folder, verifier, section, anchors)
    return RewardPool(config, policy_folder, section)


def _build_model_scorer(config: ModelReward, policy_folder: Path, section: str, copies: ModelCopies | None) -> Scorer:
    from rollflow.tasks.policies.tokenizer import PolicyTokenizer
    from rollflow.tasks.scorers.model.copies import LocalCopy
    from rollflow.tasks.scorers.model.local import open_classifier
    from rollflow.tasks.scorers.model.scorer import ModelScorer

    local = LocalCopy(functools.partial(open_classifier, config, section))
    return ModelScorer(config, PolicyTokenizer(policy_folder).decode_response, copies or local)


def _build_composite_scorer(
    config: CompositeReward,
    policy_folder: Path,
    section: str,
    copies: FindCopies,
    anchors: CaseAnchors | None,
    usages: Mapping[str, JudgeUsage] | None,
) -> Scorer:
    from rollflow.tasks.policies.tokenizer import PolicyTokenizer
    from rollflow.tasks.scorers.composite import CompositeScorer

    scorers = {
        name: build_scorer(
            part,
            policy_folder,
            name_part(section, name),
            copies,
            anchors if has_adaptive_deadlines(part) else None,
            usages,
        )
        for name, part in config.part_scorers.items()
    }
    return CompositeScorer(config, scorers, PolicyTokenizer(policy_folder).decode_response)


def build_verifier(config: RewardConfig, section: str = "reward") -> Verifier:
    """Build the verifier that the config section `[section]` describes, and import the verifier's modules.

    Raises:
        ConfigError: the user-defined verifier does not exist, or this kind of scorer is not a verifier function.
    """
    match config:
        case ReasoningGymReward():
            from rollflow.tasks.scorers.reasoning_gym import family_score

            return Verifier(family_score)
        case ExactReward():
            from rollflow.tasks.scorers.exact import exact

            return Verifier(exact)
        case CodeReward():
            from rollflow.tasks.scorers.code.scorer import CodeScorer

            scorer = CodeScorer(config)
            return Verifier(scorer.score, is_async=True, end=scorer.close)
        case MathsReward():
            from rollflow.tasks.scorers.text.maths import maths

            return Verifier(functools.partial(maths, marked=config.marked, decimals=config.decimals))
        case ChoiceReward():
            from rollflow.tasks.scorers.text.choice import choose

            return Verifier(choose)
        case RegexReward():
            from rollflow.tasks.scorers.text.regex import match_pattern

            return Verifier(functools.partial(match_pattern, config=config))
        case InstructionsReward():
            from rollflow.tasks.scorers.text.instructions import follow_instructions
            from rollflow.tasks.scorers.text.language import load_detector

            load_detector()
            return Verifier(functools.partial(follow_instructions, strict=config.strict))
        case ModelReward():
            from rollflow.tasks.scorers.model.local import ModelVerifier

            return Verifier(ModelVerifier(config).score, takes_several=True)
        case CompositeReward():
            return _build_composite(config, section)
        case JudgeReward():
            raise ConfigError("kind = 'judge': a judge answers over the network, so it cannot be built as a function")
        case ImportReward():
            from rollflow.tasks.scorers.imported import imported_verifier

            return imported_verifier(config, section)


def _build_composite(config: CompositeReward, section: str) -> Verifier:
    from rollflow.tasks.scorers.composite import CompositeVerifier

    if config.is_mixed:
        raise ConfigError(
            f"{section}.kind = 'composite': one of its parts is a judge or a reward model, so it cannot be built "
            "as a function that scores a text in this process"
        )
    parts = {name: build_verifier(part.scorer, name_part(section, name)) for name, part in config.parts.items()}
    return CompositeVerifier(config, parts).build()
