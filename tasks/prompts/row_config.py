"""Defines config classes that choose rows of a prompt file: the rows to train on, and the rows of evaluation sets."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollflow.tasks.runtime.sections import Section, refuse


class DifficultyRange(Section):
    """The range of difficulty. A row of a prompt file is trained on only if its number in a column is within the
    range.
    """

    column: str = Field(
        "pass_rate",
        min_length=1,
        description="column of the prompt file that contains a number for each row, such as a pass rate",
    )
    min: float | None = Field(
        None,
        allow_inf_nan=False,
        description="smallest number with which a row of the prompt file is trained on; default: no lower limit",
    )
    max: float | None = Field(
        None,
        allow_inf_nan=False,
        description="largest number with which a row of the prompt file is trained on; default: no upper limit",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.min is None and self.max is None:
            refuse("prompts.difficulty", self.column, "the difficulty has no limit; set prompts.difficulty.min or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            refuse("prompts.difficulty.min", self.min, f"it must not be above max = {self.max}; choose a smaller min")
        return self

    def contains(self, number: float) -> bool:
        """Return whether a row of this difficulty is trained on."""
        return (self.min is None or number >= self.min) and (self.max is None or number <= self.max)

    def __str__(self) -> str:
        limits = [f"{name} = {value:g}" for name, value in (("min", self.min), ("max", self.max)) if value is not None]
        return f"{self.column}, {', '.join(limits)}"


class EvaluationSet(Section):
    """A file or split whose questions are held out from training, and evaluated under the name of the set."""

    path: str | None = Field(
        None,
        min_length=1,
        description="path of the file with the evaluation set's questions; default: the path of the prompt source",
    )
    split: str | None = Field(
        None,
        min_length=1,
        description='split of a data set with format = "saved" or "hub" that is evaluated; default: the split '
        '"train", if the data set has splits',
    )
    columns: dict[str, str] | None = Field(
        None,
        description="names of the file's columns for the names that rollflow uses; default: the columns of the "
        "prompt source",
    )
    prompts: int = Field(256, gt=0, description="largest number of questions of this set that an evaluation asks")

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.path is None and self.split is None:
            refuse(
                "prompts.evaluation_sets",
                "",
                "an evaluation set needs a path or a split, but one has neither; name one of them",
            )
        return self
