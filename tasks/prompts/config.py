"""Defines the `[[prompts]]` sections of a run's TOML file, with one class for each kind of question source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.games.config import FrozenLakePrompts, KuhnPokerPrompts, SeedPrompts, SokobanPrompts
from rollflow.tasks.prompts.row_config import DifficultyRange, EvaluationSet
from rollflow.tasks.prompts.section import PromptBase
from rollflow.tasks.runtime.sections import Imported, refuse


class ReasoningGymPrompts(PromptBase):
    """Prompts that the package reasoning-gym generates, from one of its data sets."""

    kind: Literal["reasoning-gym"] = Field("reasoning-gym", description="questions that reasoning-gym generates")
    family: str = Field("chain_sum", description="name of the reasoning-gym data set that generates the questions")
    options: dict[str, Any] = Field(
        default_factory=dict, description="options that are passed to the reasoning-gym data set, e.g. {min_digits = 2}"
    )

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.family


class FileBase(PromptBase):
    """The config keys of question sources that read user-defined prompts from a file."""

    path: str = Field(
        description="path of a file with one JSON object per line; a relative path is relative to the recipe file"
    )
    held_out: float = Field(
        0.1, ge=0, lt=1, description="share of the prompt file's rows that are held out for evaluation"
    )
    answer_after: str | None = Field(
        None,
        min_length=1,
        description='text that marks the answer in a worked solution, e.g. "####"; only the text after the mark is '
        "the reference answer; default: the whole solution",
    )
    reward_column: str | None = Field(
        None,
        min_length=1,
        description="column of the prompt file in which a row may name its own scorer, from a section [rewards.NAME]; "
        "other rows use the scorer of the prompt source",
    )
    difficulty: DifficultyRange | None = Field(
        None,
        description="range of difficulty: only rows whose number in a chosen column lies in this range are trained on; "
        "default: all rows are trained on",
    )
    near_duplicates: Literal["count", "drop"] = Field(
        "count",
        description="what happens to a training question that is almost equal to a held-out question. count: it is "
        "trained on and counted; drop: it is not trained on",
    )
    solved_every: int = Field(
        1,
        ge=1,
        description="a solved question is asked in only one of this number of epochs (passes over all questions); 1: "
        "in every epoch",
    )
    solved_from: float = Field(
        1.0,
        gt=0,
        le=1,
        description="smallest share of correct responses with which a question counts as solved; this key requires "
        "solved_every to be 2 or more",
    )

    @model_validator(mode="after")
    def _check_solved(self) -> Self:
        if self.solved_every == 1 and self.solved_from != 1.0:
            refuse("prompts.solved_from", self.solved_from, "it needs solved_every; set solved_every = 2 or more")
        return self

    def scorer_of(self, reference: Mapping[str, Any]) -> str:
        """Return the name of a row's scorer, from its column `reward_column` or else from the question source."""
        named = reference.get(self.reward_column) if self.reward_column else None
        return str(named or self.reward or "")

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return Path(self.path).stem

    @property
    def unit(self) -> str:
        """The word for a row of the prompt file in error messages: "line" or "row"."""
        return "line"

    @property
    def key(self) -> str:
        """The config key that names the prompt file."""
        return "prompts.path"

    @property
    def held_out_file(self) -> HeldOutFile | None:
        """The file with the held-out questions, or None if they are drawn from the rows of `path`."""
        return None

    @property
    def set_files(self) -> dict[str, HeldOutFile]:
        """The file of each evaluation set, by the name of the evaluation set."""
        return {}

    @property
    def files(self) -> tuple[FileBase, ...]:
        """All files of the question source: training questions, held-out questions and evaluation sets."""
        held_out = () if self.held_out_file is None else (self.held_out_file,)
        return (self, *held_out, *self.set_files.values())

    def label(self, name: str) -> str:
        """Return how error messages name the column that rollflow reads as `name`, such as "question"."""
        return name

    def refusal(self, what: str) -> ConfigError:
        """Build the error that names the prompt file and says what is wrong."""
        return ConfigError(f"{self.key} = {self.path!r}: {what}")


class JsonlPrompts(FileBase):
    """User-defined prompts in a file: each line is a JSON object with the keys `question` and `answer`."""

    kind: Literal["jsonl"] = Field("jsonl", description="your own questions, from a file of JSON lines")


Format = Literal["jsonl", "csv", "tsv", "parquet", "saved", "hub"]
# suffix of a prompt file -> its format; the formats `hub` and `saved` have no suffix
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}


class FilePrompts(FileBase):
    """User-defined prompts in a table: JSON lines, CSV, TSV, Parquet, or a data set of the library `datasets`."""

    split_key: ClassVar[str] = "prompts.split"

    kind: Literal["file"] = Field("file", description="your own questions, from a table in one of several formats")
    path: str = Field(
        description='path of a prompt file or folder, relative to the recipe file; with format = "hub", the name of '
        "a data set on the Hugging Face hub"
    )
    format: Format | None = Field(
        None,
        description='format of the prompts in path. "saved": a folder that `save_to_disk` of the library '
        '`datasets` wrote; "hub": a data set on the Hugging Face hub; default: the format is chosen by the file\'s '
        'suffix, and a folder is "saved"',
    )
    subset: str | None = Field(None, min_length=1, description='name of the subset (configuration) of a "hub" data set')
    split: str | None = Field(
        None,
        min_length=1,
        description='split to train on of a "saved" or "hub" data set; default: "train" if there are splits',
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="names of the prompt file's columns for the names that rollflow uses, e.g. {question = "
        '"problem", answer = "solution"}; the name `system` stands for the system message of a row',
    )
    json_columns: tuple[str, ...] = Field(
        (), description="columns of the prompt file that contain JSON, e.g. messages or test cases in a CSV file"
    )

    held_out_path: str | None = Field(
        None,
        min_length=1,
        description="path of a file whose rows are the held-out questions; default: a share of the rows of path",
    )
    held_out_split: str | None = Field(
        None,
        min_length=1,
        description='split of a "saved" or "hub" data set whose rows are the held-out questions; default: none',
    )

    evaluation_sets: dict[str, EvaluationSet] = Field(
        default_factory=dict,
        description="additional files or splits with held-out questions, each of which is evaluated under its own name",
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def held_out_file(self) -> HeldOutFile | None:
        """The file or split with the held-out questions, or None if they are drawn from the rows of `path`."""
        if self.held_out_path is None and self.held_out_split is None:
            return None
        return self._build_held_out(self.held_out_path, self.held_out_split)

    @property
    def set_files(self) -> dict[str, HeldOutFile]:
        """The file or split of each evaluation set, by the name of the evaluation set."""
        return {
            name: self._build_held_out(one.path, one.split, one.columns, f"prompts.evaluation_sets.{name}")
            for name, one in self.evaluation_sets.items()
        }

    def _build_held_out(
        self, path: str | None, split: str | None, columns: dict[str, str] | None = None, section: str = ""
    ) -> HeldOutFile:
        """Return the config of a file or split with held-out questions; the config section `section` names the file."""
        keys = {**dict(self), "held_out_path": None, "held_out_split": None, "split": split, "section": section}
        keys |= {"difficulty": None, "evaluation_sets": {}}  # keys that apply only to training questions
        keys |= {} if columns is None else {"columns": columns}
        if path is None:
            return HeldOutFile(**keys)
        suffix = Path(path).suffix.lower()
        return HeldOutFile(**keys | {"path": path, "format": SUFFIXES.get(suffix, self.format), "subset": None})

    @property
    def chosen_format(self) -> Format | None:
        """The format of the prompt file, from `format` or the file's suffix; None if neither names a format."""
        return self.format or SUFFIXES.get(Path(self.path).suffix.lower())

    @property
    def unit(self) -> str:
        """The word for a row of the prompt file in error messages: "line" or "row"."""
        return "line" if self.chosen_format in ("jsonl", "csv", "tsv") else "row"

    def label(self, name: str) -> str:
        """Return how error messages name the column that rollflow reads as `name`, such as "question"."""
        return f"column {self.columns[name]!r}" if name in self.columns else name

    def split_refusal(self, what: str) -> ConfigError:
        """Build the error that names the split of the data set and says what is wrong."""
        return ConfigError(f"{self.split_key} = {self.split!r}: {self.path!r} {what}")

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if "system" in self.columns and not self.chat:
            cure = "the system message is not used without chat = true; set chat = true, or remove columns.system"
            refuse("prompts.columns.system", self.columns["system"], cure)
        return self

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        share = type(self).model_fields["held_out"].default
        for name in ("held_out_path", "held_out_split"):
            if getattr(self, name) is not None and self.held_out != share:
                refuse(
                    "prompts.held_out",
                    self.held_out,
                    f"the held-out questions come from {name}; remove one of the two keys",
                )
        return self


class HeldOutFile(FilePrompts):
    """The file or data-set split with the held-out questions of a question source."""

    split_key: ClassVar[str] = "prompts.held_out_split"
    # config section of the evaluation set in the file; "" if `held_out_path` or `held_out_split` names the file
    section: str = ""

    @property
    def key(self) -> str:
        """The config keys that name the file and, if a split is chosen, the split."""
        if self.section:
            return f"{self.section}.path" if self.split is None else f"{self.section}.split = {self.split!r} of path"
        return "prompts.held_out_path" if self.split is None else f"split {self.split!r} of prompts.path"


class ColumnSumsPrompts(PromptBase):
    """Sums of several numbers, with column-by-column demonstrations, for the verifier `exact` with `answer = "tag"`."""

    kind: Literal["column-sums"] = Field(
        "column-sums", description="questions that ask for a sum, with demonstrations that write out the steps"
    )
    min_terms: int = Field(2, ge=2, description="smallest number of terms in a sum")
    max_terms: int = Field(3, le=10, description="largest number of terms in a sum")
    min_digits: int = Field(2, ge=1, description="smallest number of digits in each term of a sum")
    max_digits: int = Field(4, le=6, description="largest number of digits in each term of a sum")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for name in ("terms", "digits"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least > most:
                refuse(
                    f"prompts.min_{name}",
                    least,
                    f"min_{name} must not be above max_{name} = {most}; choose a smaller min_{name}",
                )
        return self

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.kind


class SortingPrompts(PromptBase):
    """Questions of several digits, which the policy must sort, for the verifier `exact`."""

    kind: Literal["sorting"] = Field(
        "sorting", description="questions that consist of several digits, which the policy must sort"
    )
    digits: int = Field(5, ge=2, le=8, description="number of digits to sort in each question")
    held_out: float = Field(
        0.2, gt=0, lt=1, description="share of the possible multisets of digits that are held out for evaluation"
    )

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.kind


class ImportPrompts(Imported, PromptBase):
    """Prompts that a user-defined class generates."""

    kind: Literal["import"] = Field(
        "import", description="your own questions, imported from a class that derives from QuestionSource"
    )
    name: str = Field("", description="name of this prompt source in metrics; default: the name of the class")

    @property
    def domain(self) -> str:
        """Name of this question source in metrics, such as "sums"."""
        return self.name or self.path.partition(":")[2]


PromptConfig = Annotated[
    ReasoningGymPrompts
    | JsonlPrompts
    | FilePrompts
    | ColumnSumsPrompts
    | SortingPrompts
    | FrozenLakePrompts
    | SokobanPrompts
    | KuhnPokerPrompts
    | SeedPrompts
    | ImportPrompts,
    Field(discriminator="kind"),
]


def find_set_faults(sources: Sequence[PromptConfig]) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and fix of each evaluation set whose name is used twice, or cannot be part of a metric's
    name.
    """
    taken = {source.domain for source in sources}
    for which, source in enumerate(sources):
        for name in source.evaluation_sets if isinstance(source, FilePrompts) else {}:
            key = f"prompts.{which}.evaluation_sets"
            if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII):
                yield key, name, "the name of a set has letters, digits, - and _; rename the set"
            elif name in taken:
                yield key, name, "another set or source has this name; rename the set"
            taken.add(name)
