"""Registers deployments with Prefect, without overwriting changes that a user made in the Prefect UI (Prefect's own
upsert overwrites them).

The parameters, description, tags, concurrency limit and schedules of a deployment are sent only if no user has changed
them since the last registration; the deployment's version field contains a digest of each registered value. The
entrypoint and the parameter form are sent whenever they differ from those in Prefect, because only rollflow's code
determines them. If nothing has changed, nothing is sent, so that Prefect keeps the flow runs that a schedule created in
advance.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rollflow.flows.registration.form import build_form
from rollflow.flows.registration.prefect_api import (
    INTERNAL,
    OF_SESSION,
    call_until_answered,
    deployment_names,
    open_client,
    unfinished_runs,
)
from rollflow.storage.errors import ConfigError

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

SLUG = "rollflow"  # slug of the Prefect schedule that a recipe (a run's config file) defines
# seconds without a poll after which a deployment's runner process counts as dead; it polls every second
SILENT_SECONDS = 120.0
# seconds without a poll after which another command may replace a deployment's runner process
DEAD_SECONDS = 20.0
POLL_SECONDS = 1.0
HOME = "home:"  # prefix of the tag that names the run home to which a Prefect deployment belongs
PERSONS = (
    "parameters",
    "description",
    "tags",
    "concurrency_limit",
    "schedules",
)  # fields of a Prefect deployment that a user may change in the Prefect UI


@dataclass(frozen=True)
class DeploymentOffer:
    """The values with which a Prefect deployment is registered. `limit` is the largest number of concurrent flow runs
    of the deployment; Prefect cancels further flow runs.
    """

    flow: Flow[Any, Any]
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    tags: tuple[str, ...] = ()
    limit: int | None = None
    cron: tuple[str, str] | None = None  # the schedule's cron expression and time zone
    hidden: tuple[str, ...] = ()  # names of parameters that the form does not show
    storage: None = None  # a field that Prefect's runner reads

    @property
    def flow_name(self) -> str:
        return self.flow.name

    @property
    def entrypoint(self) -> str:
        """The flow's entrypoint in module form, because the path form would give the flow a wrong `__module__`."""
        return f"{self.flow.fn.__module__}.{self.flow.fn.__name__}"

    async def aapply(self) -> UUID:
        """Register the deployment; `prefect.Runner` calls this."""
        return await asyncio.to_thread(call_until_answered, lambda: register(self))


def register(offer: DeploymentOffer) -> UUID:
    """Create or update the Prefect deployment; return its id."""
    from prefect.exceptions import ObjectNotFound

    with open_client() as client:
        try:
            there = client.read_deployment_by_name(f"{offer.flow_name}/{offer.name}")
        except ObjectNotFound:
            return _create(client, offer)
        _update(client, there, offer)
        return there.id


def _create(client: SyncPrefectClient, offer: DeploymentOffer) -> UUID:
    from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions

    cancel = ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    return client.create_deployment(
        flow_id=client.create_flow_from_name(offer.flow_name),
        concurrency_options=cancel if offer.limit else None,
        enforce_parameter_schema=True,
        **_code_fields(offer),
        **_user_fields(offer),
        name=offer.name,
    )


def _update(client: SyncPrefectClient, there: DeploymentResponse, offer: DeploymentOffer) -> None:
    from prefect.client.schemas.actions import DeploymentUpdate

    last, now = (there.version or "").rpartition(" ")[2].split("."), _user_fields(offer)
    untouched = [digest == _digest(_read_field(there, name)) for name, digest in zip(PERSONS, last, strict=False)]
    ours = {name: now[name] for name, as_it_was in zip(PERSONS, untouched, strict=False) if as_it_was}
    sent = _code_fields(offer) | ours
    digests = [_digest(now[name]) if name in ours else old for name, old in zip(PERSONS, last, strict=False)]
    sent["version"] = f"{version('rollflow')} {'.'.join(digests)}"
    if changed := {name: value for name, value in sent.items() if value != _read_field(there, name)}:
        client.update_deployment(there.id, DeploymentUpdate(**changed))


def _code_fields(offer: DeploymentOffer) -> dict[str, Any]:
    """Return the fields of the Prefect deployment that no user changes: the entrypoint, the form, and the version with
    the digests of the user's fields.
    """
    digests = ".".join(_digest(value) for value in _user_fields(offer).values())
    return {
        "entrypoint": offer.entrypoint,
        "parameter_openapi_schema": build_form(offer.flow, offer.hidden),
        "version": f"{version('rollflow')} {digests}",
    }


def _user_fields(offer: DeploymentOffer) -> dict[str, Any]:
    schedule = {"cron": offer.cron[0], "timezone": offer.cron[1], "day_or": True} if offer.cron else None
    schedules = [{"schedule": schedule, "active": True, "slug": SLUG}] if schedule else []
    values = (dict(offer.parameters), offer.description, sorted(offer.tags), offer.limit, schedules)
    return dict(zip(PERSONS, values, strict=True))


def _read_field(there: DeploymentResponse, name: str) -> Any:
    if name == "concurrency_limit":
        return there.global_concurrency_limit.limit if there.global_concurrency_limit else None
    if name == "tags":
        return sorted(there.tags)
    if name == "schedules":
        return [one.model_dump(mode="json", include={"schedule", "active", "slug"}) for one in there.schedules]
    return getattr(there, name)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def home_tag(home: Path) -> str:
    """Return the tag that marks the Prefect deployments of a run home (rollflow's folder of local files) on a shared
    server.
    """
    return f"{HOME}{socket.gethostname()}:{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]}"


def check_unserved(name: str, home: Path) -> None:
    """Check that no command in another run home serves Prefect deployments with this name; wait for a dead command to
    time out.

    Two commands that serve the same deployment would take each other's flow runs, and the first to end would delete the
    deployment.

    Raises:
        ConfigError: a command of another run home serves these deployments.
    """
    limit = time.monotonic() + DEAD_SECONDS + POLL_SECONDS
    while others := _list_other_homes(name, home_tag(home)):
        if time.monotonic() > limit:
            raise ConfigError(
                f"{name} is already running on this Prefect server, started by another command "
                f"({others[0].removeprefix(HOME)}); end that command, or wait for it"
            )
        time.sleep(POLL_SECONDS)


def _list_other_homes(name: str, own: str) -> list[str]:
    """List the tags of other run homes whose runner processes have recently polled Prefect deployments with this
    name.
    """
    with open_client() as client:
        there = [
            one
            for one in _read_tagged(client, OF_SESSION)
            if one.name in deployment_names(name) and not _is_silent(one, DEAD_SECONDS)
        ]
    return [tag for one in there for tag in one.tags if tag.startswith(HOME) and tag != own]


def list_superseded(offers: Iterable[DeploymentOffer], name: str) -> list[DeploymentOffer]:
    """Return the Prefect deployments that an older rollflow registered as `name` and that unfinished flow runs need.

    The function deletes each Prefect deployment called `name` that no unfinished flow run needs.
    """
    from prefect.exceptions import ObjectNotFound

    waited = []
    with open_client() as client:
        waiting = {run.deployment_id for run in unfinished_runs(client, name)}
        for offer in offers:
            try:
                there = client.read_deployment_by_name(f"{offer.flow_name}/{name}")
            except ObjectNotFound:
                continue
            if there.id in waiting:
                waited.append(replace(offer, name=name))
            elif INTERNAL in there.tags:
                client.delete_deployment(there.id)
    return waited


def withdraw(name: str, home: Path) -> None:
    """Delete the Prefect deployments with this name that commands of this run home served; keep the deployments of
    other run homes.
    """
    with open_client() as client:
        for one in _read_tagged(client, OF_SESSION):
            homes = [tag for tag in one.tags if tag.startswith(HOME)]
            if one.name in deployment_names(name) and homes in ([], [home_tag(home)]):
                client.delete_deployment(one.id)


def sweep() -> list[str]:
    """Delete Prefect deployments whose command has died: their runner has not polled them for `SILENT_SECONDS`. Return
    the deleted deployments' names.
    """
    with open_client() as client:
        dead = [one for one in _read_tagged(client, OF_SESSION) if _is_silent(one)]
        for one in dead:
            client.delete_deployment(one.id)
    return sorted({one.name for one in dead})


def _read_tagged(client: SyncPrefectClient, tag: str) -> list[DeploymentResponse]:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    return client.read_deployments(deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[tag])))


def _is_silent(one: DeploymentResponse, seconds: float = SILENT_SECONDS) -> bool:
    asked = one.last_polled or one.created
    return asked is not None and time.time() - asked.timestamp() > seconds
