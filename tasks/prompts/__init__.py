"""Question sources: see `base` for what each one guarantees."""

from __future__ import annotations

from rollflow.tasks.prompts.base import QuestionSource, Reader
from rollflow.tasks.prompts.config import (
    ColumnSumsPrompts,
    ImportPrompts,
    JsonlPrompts,
    PromptConfig,
    ReasoningGymPrompts,
    SortingPrompts,
)


def build_source(config: PromptConfig, seed: int, held_out: int, read: Reader) -> QuestionSource:
    """The question source of one `[[prompts]]` entry, with `held_out` questions kept for evaluation.

    Raises:
        ConfigError: with one sentence for what a person must change.
    """
    match config:
        case ReasoningGymPrompts():
            from rollflow.tasks.prompts.reasoning_gym import ReasoningGymSource

            return ReasoningGymSource(config, seed, held_out)
        case JsonlPrompts():
            from rollflow.tasks.prompts.jsonl import JsonlSource

            return JsonlSource(config, seed, read(config))
        case ColumnSumsPrompts():
            from rollflow.tasks.prompts.column_sums import ColumnSumsSource

            return ColumnSumsSource(config, seed, held_out)
        case SortingPrompts():
            from rollflow.tasks.prompts.sorting import SortingSource

            return SortingSource(config, seed)
        case ImportPrompts():
            from rollflow.tasks.prompts.imported import ImportedSource

            return ImportedSource(config, seed, held_out)
