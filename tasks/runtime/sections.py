"""Defines base classes and checks for the sections of a config file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from typing import Any, ClassVar, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from rollflow.tasks.runtime.renamed_keys import Renames

LARGEST = 2**63 - 1
# largest number of seconds in a config, about thirty years, because Ray cannot wait for centuries
LONGEST_SECONDS = 1e9
# names of environment variables that probably hold a secret
SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|API_KEY|AUTH_STRING|(^|_)(TOKEN|KEY)$", re.I)
IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class Section(BaseModel):
    """Base class of a section of the config, which is immutable and rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    keys_page: ClassVar[str] = "`rollflow keys`"  # the command that lists all keys of the file
    # config key that must not change once the run exists -> reason (see `config_changes`)
    fixed: ClassVar[Mapping[str, str]] = {}
    renames: ClassVar[Renames] = Renames()  # old names of keys and values in the section

    def permits_change(self, key: str) -> bool:
        """Return whether `key` may change, although it is part of a config key that must not change."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _with_new_names(cls, tree: Any) -> Any:
        """Reject old names of config keys and values."""
        refuse_all(refusal(*renamed) for renamed in cls.renames.refusals(tree))
        return tree

    @model_validator(mode="before")
    @classmethod
    def _with_kinds(cls, tree: Any) -> Any:
        """Add the default kind to each config subsection that names no kind."""
        return with_kinds(cls, tree)


def with_kinds(section: type[Section], tree: Any) -> Any:
    """Return a config section with the default kind added to each subsection that names no kind.

    True and false are rejected where a number is expected.
    """
    if not isinstance(tree, Mapping):
        return tree
    for name, given in tree.items():
        _reject_bool(name, given, section.model_fields.get(name))
    return {name: _add_default_kind(given, section.model_fields.get(name)) for name, given in tree.items()}


def _reject_bool(name: str, given: Any, info: FieldInfo | None) -> None:
    """Reject true and false where the config expects a number, because pydantic would convert them to 1 and 0."""
    if info is None or not _contains_bool(given):
        return
    kinds = _list_types(info.annotation)
    if (int in kinds or float in kinds) and bool not in kinds and Any not in kinds:
        context = {"key": name, "value": given}
        error = PydanticCustomError("truth", "true and false are not numbers; write a number", context)
        raise error


def _contains_bool(given: Any) -> bool:
    return isinstance(given, bool) or (isinstance(given, list | tuple) and any(map(_contains_bool, given)))


def _list_types(annotation: Any) -> list[Any]:
    """List all types that occur in a type annotation."""
    return [annotation, *(kind for part in get_args(annotation) for kind in _list_types(part))]


def _add_default_kind(given: Any, info: FieldInfo | None) -> Any:
    """Return the value of a config field, with the default kind if the field is a union of kinds and names none."""
    if info is None or not isinstance(info.discriminator, str) or not isinstance(given, Mapping):
        return given
    return {info.discriminator: getattr(info.default, info.discriminator), **given}


class Imported(Section):
    """Config of a user-defined part, which is named by an import path (see `tasks/runtime/imports.py`)."""

    fixed: ClassVar[Mapping[str, str]] = {"path": "the run's start recorded the hash of this file"}

    path: str = Field(
        pattern=IMPORT_PATH, description="import path of your own class or function, e.g. my_package.parts:name"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments with which your own class or function is called"
    )


def refusal(key: str, value: object, cure: str) -> PydanticCustomError:
    """Build the error that shows the user a config key, its value, and what to do."""
    return PydanticCustomError("rollflow", "{key} = {value}: {cure}", {"key": key, "value": repr(value), "cure": cure})


def refuse(key: str, value: object, cure: str) -> NoReturn:
    """Raise the error for one wrong value in a config, from a validator."""
    raise refusal(key, value, cure)


def refuse_all(refusals: Iterable[PydanticCustomError]) -> None:
    """Raise a single error for several wrong values in a config, from a validator."""
    if found := [InitErrorDetails(type=one, input=None) for one in refusals]:
        raise ValidationError.from_exception_data(title="", line_errors=found)


def check_storable(value: object, key: str = "") -> None:
    """Reject config values that JSON cannot represent, because a config is stored as JSON."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            check_storable(one, f"{key}.{name}".lstrip("."))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for position, one in enumerate(value):
            check_storable(one, f"{key}.{position}")
    elif isinstance(value, float) and not math.isfinite(value):
        refuse(key, value, "a run stores its config as JSON, which has no such number; choose a finite one")
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        refuse(
            key, value, "no process can read this number, because it needs more than 64 bits; choose a smaller number"
        )
    elif isinstance(value, (date, time)):
        refuse(key, str(value), "a run stores its config as JSON, which has no dates; put it in quotes")
