"""Config classes that choose rows of a prompt file: the rows to train on, and the rows of named evaluation sets."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollflow.tasks.runtime.sections import Section, refuse


class DifficultyRange(Section):
    """The rows of a file that are trained on, by a number in a column; other rows are left out."""

    column: str = Field("pass_rate", min_length=1, description="column of the file with a number in each row")
    min: float | None = Field(
        None, allow_inf_nan=False, description="smallest number of a row that is trained on; default: no limit"
    )
    max: float | None = Field(
        None, allow_inf_nan=False, description="largest number of a row that is trained on; default: no limit"
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.min is None and self.max is None:
            refuse("prompts.difficulty", self.column, "it has no limit; set min or max")
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
    """A file or split that is held out, and evaluated under a name of its own."""

    path: str | None = Field(None, min_length=1, description="path of the file; default: prompts.path")
    split: str | None = Field(
        None, min_length=1, description='split of a "saved" or "hub" data set; default: "train" if there are splits'
    )
    columns: dict[str, str] | None = Field(
        None, description="the file's columns by their names in rollflow; default: prompts.columns"
    )
    prompts: int = Field(256, gt=0, description="largest number of questions that an evaluation asks")

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.path is None and self.split is None:
            refuse("prompts.evaluation_sets", "", "a set has neither path nor split; name one of them")
        return self
