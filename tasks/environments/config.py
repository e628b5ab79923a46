"""The `[environment]` section: one class for each kind of environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import Imported, Section

EPISODES = {"kind": "the trajectories in the log are its episodes"}


class SingleTurnEnvironment(Section):
    """One prompt, one response, one reward."""

    fixed: ClassVar[Mapping[str, str]] = EPISODES

    kind: Literal["single-turn"] = Field(
        "single-turn", description="one prompt, one response, and the verifier's reward"
    )


class ImportEnvironment(Imported):
    """A user-defined environment."""

    fixed: ClassVar[Mapping[str, str]] = EPISODES

    kind: Literal["import"] = Field("import", description="your own environment: a class that derives from Environment")


EnvironmentConfig = Annotated[SingleTurnEnvironment | ImportEnvironment, Field(discriminator="kind")]
