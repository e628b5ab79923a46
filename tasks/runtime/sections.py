"""What every part of the config tree is made of. Imports pydantic only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from typing import Any, ClassVar, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

LARGEST = 2**63 - 1
LONGEST_SECONDS = 1e9  # thirty years; Ray and threads can wait no longer than some hundred
IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class Section(BaseModel):
    """A frozen part of the config tree; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind_key: ClassVar[str] = "kind"  # the key that says which of several sections stands in a place
    fixed: ClassVar[Mapping[str, str]] = {}  # key that no recorded run may change -> why; see `config_changes`

    @model_validator(mode="before")
    @classmethod
    def _with_kinds(cls, tree: Any) -> Any:
        """See `with_kinds`."""
        return with_kinds(cls, tree)


def with_kinds(section: type[Section], tree: Any) -> Any:
    """The tree of a section: what names no kind, of several, is of the kind that is the default. Truth is no number."""
    if not isinstance(tree, Mapping):
        return tree
    for name, given in tree.items():
        _check_truth(name, given, section.model_fields.get(name))
    return {name: _with_kind(given, section.model_fields.get(name)) for name, given in tree.items()}


def _check_truth(name: str, given: Any, info: FieldInfo | None) -> None:
    """TOML tells truth from numbers; pydantic takes one for 1 or 0."""
    if info is None or not _holds_truth(given):
        return
    kinds = _kinds(info.annotation)
    if (int in kinds or float in kinds) and bool not in kinds and Any not in kinds:
        context = {"key": name, "value": given}
        raise PydanticCustomError("truth", "true and false are no numbers; write a number", context)


def _holds_truth(given: Any) -> bool:
    return isinstance(given, bool) or (isinstance(given, list | tuple) and any(map(_holds_truth, given)))


def _kinds(annotation: Any) -> list[Any]:
    """The types in an annotation."""
    return [annotation, *(kind for part in get_args(annotation) for kind in _kinds(part))]


def _with_kind(given: Any, info: FieldInfo | None) -> Any:
    """What stands in a field, with the kind that is its default where there are several."""
    if info is None or not isinstance(info.discriminator, str) or not isinstance(given, Mapping):
        return given
    return {info.discriminator: getattr(info.default, info.discriminator), **given}


class Imported(Section):
    """A part that is a person's own, by its import path. See `tasks/runtime/imports.py` for what may be imported."""

    fixed: ClassVar[Mapping[str, str]] = {"path": "the hash of its file was recorded when the run began"}

    path: str = Field(pattern=IMPORT_PATH, description="what is imported, e.g. my_package.parts:name")
    options: dict[str, Any] = Field(default_factory=dict, description="given to it by name")


def refusal(key: str, value: object, cure: str) -> PydanticCustomError:
    """What a person must change: the key, its value, and what to do."""
    return PydanticCustomError("rollflow", "{key} = {value}: {cure}", {"key": key, "value": repr(value), "cure": cure})


def refuse(key: str, value: object, cure: str) -> NoReturn:
    """What a validator raises at the first thing that is wrong."""
    raise refusal(key, value, cure)


def refuse_all(refusals: Iterable[PydanticCustomError]) -> None:
    """What a validator calls that looks for several things: all that is wrong is told together."""
    if found := [InitErrorDetails(type=one, input=None) for one in refusals]:
        raise ValidationError.from_exception_data("", found)


def check_storable(value: object, key: str = "") -> None:
    """Refuse what a run could not keep: its config is JSON in its storage, and a parameter of its flows."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            check_storable(one, f"{key}.{name}".lstrip("."))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for position, one in enumerate(value):
            check_storable(one, f"{key}.{position}")
    elif isinstance(value, float) and not math.isfinite(value):
        refuse(key, value, "a run keeps its config as JSON, which has no such number; choose a finite one")
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        refuse(key, value, "no process could read it in 64 bits; choose a smaller number")
    elif isinstance(value, (date, time)):
        refuse(key, str(value), "a run keeps its config as JSON, which has no dates; put it in quotes")
