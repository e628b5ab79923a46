"""What every part of the config tree is made of. Imports pydantic only."""

from __future__ import annotations

from typing import NoReturn

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen part of the config tree; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def refuse(key: str, value: object, cure: str) -> NoReturn:
    """What a validator raises: the key, its value, and what to do."""
    raise PydanticCustomError("rollflow", "{key} = {value}: {cure}", {"key": key, "value": repr(value), "cure": cure})
