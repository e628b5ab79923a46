"""The `[environment]` section: what an episode is. One class a kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.sections import Imported, Section


class SingleTurnEnvironment(Section):
    """A prompt, one response, its reward."""

    kind: Literal["single-turn"] = Field("single-turn", description="a prompt, one response, the verifier's reward")


class ImportEnvironment(Imported):
    """Episodes of your own."""

    kind: Literal["import"] = Field("import", description="a class of your own, derived from Environment")


EnvironmentConfig = Annotated[SingleTurnEnvironment | ImportEnvironment, Field(discriminator="kind")]
