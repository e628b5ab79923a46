"""Builds question sources, which produce the questions of a run's prompts. The module `base` defines their
interface.
"""

from __future__ import annotations

from rollflow.tasks.prompts.base import QuestionSource, Reader
from rollflow.tasks.prompts.config import (
    ColumnSumsPrompts,
    FilePrompts,
    ImportPrompts,
    JsonlPrompts,
    PromptConfig,
    ReasoningGymPrompts,
    SortingPrompts,
)
from rollflow.tasks.prompts.games.config import FrozenLakePrompts, KuhnPokerPrompts, SeedPrompts, SokobanPrompts
from rollflow.tasks.prompts.held_out import HeldOut


def build_source(config: PromptConfig, seed: int, count: int, read: Reader, held: HeldOut) -> QuestionSource:
    """Build the question source of one `[[prompts]]` section, which holds out `count` questions for evaluation.

    Held-out questions are added to `held`, and no question in `held` is trained on.

    Raises:
        ConfigError: the `[[prompts]]` section is invalid; the message says what the user must change.
    """
    match config:
        case ReasoningGymPrompts():
            from rollflow.tasks.prompts.reasoning_gym import ReasoningGymSource

            return ReasoningGymSource(config, seed, count, held)
        case JsonlPrompts() | FilePrompts():
            from rollflow.tasks.prompts.jsonl import JsonlSource

            return JsonlSource(config, seed, read, held)
        case ColumnSumsPrompts():
            from rollflow.tasks.prompts.column_sums import ColumnSumsSource

            return ColumnSumsSource(config, seed, count, held)
        case SortingPrompts():
            from rollflow.tasks.prompts.sorting import SortingSource

            return SortingSource(config, seed, held)
        case FrozenLakePrompts() | SokobanPrompts():
            from rollflow.tasks.prompts.games.source import GameSource

            return GameSource(config, seed, count, held)
        case KuhnPokerPrompts():
            from rollflow.tasks.prompts.games.deals import DealSource

            return DealSource(seed, count, held)
        case SeedPrompts():
            from rollflow.tasks.prompts.games.seeds import SeedSource

            return SeedSource(config, seed, count, held)
        case ImportPrompts():
            from rollflow.tasks.prompts.imported import ImportedSource

            return ImportedSource(config, seed, count, held)
