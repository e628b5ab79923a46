"""Builds Prefect automations that restart the crashed runs of deployments on a user's own Prefect server.

    no heartbeat of a flow run for 90 s --> it is marked as crashed
    a post-training flow run crashed    --> `recover` restarts its run

Automations are installed by name. Installing the same automation again changes nothing, so Prefect keeps the
automation's counters. Each automation applies only to the given deployments. Prefect's SQLite database gets slow under
automations, so a private server has no automations; its session restarts the runs (`keepalive/supervisor_restart.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from rollflow.flows.registration.prefect_api import open_client

HEARTBEAT_SECONDS = 30  # seconds between a flow run's heartbeats, the shortest interval that Prefect allows
SILENT_SECONDS = 90
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def install_automations(deployment: str, ids: Mapping[str, UUID]) -> None:
    """Create the two Prefect automations of this module, or update them if they have changed. `ids` maps each
    deployment's name ("flow/deployment") to its id.
    """
    with open_client() as client:
        for automation in (silent_flow_runs(deployment, ids), crashed_supervisors(deployment, ids)):
            there = client.read_automations_by_name(automation.name)
            if not there:
                client.create_automation(automation)
            elif there[0].description != automation.description:
                client.update_automation(there[0].id, automation)


def silent_flow_runs(deployment: str, ids: Mapping[str, UUID]) -> Any:
    """Build the Prefect automation that marks a flow run as crashed if its heartbeats stop before it ends."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture

    trigger = EventTrigger(
        posture=Posture.Proactive,
        after={HEARTBEAT},
        expect={HEARTBEAT, *(f"prefect.flow-run.{end}" for end in ENDS)},
        within=timedelta(seconds=SILENT_SECONDS),
        match=_match_labels({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=_match_deployments(*ids.values()),
        for_each={"prefect.resource.id"},
    )
    message = f"no heartbeat for {SILENT_SECONDS} s: its process or its machine is gone"
    action = ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message)
    return _build_automation(f"rollflow: {deployment}: silent flow runs are crashed", trigger, action)


def crashed_supervisors(deployment: str, ids: Mapping[str, UUID]) -> Any:
    """Build the Prefect automation that restarts a run's supervisor (the post-training flow) when its flow run is
    marked as crashed.
    """
    from prefect.events.actions import RunDeployment
    from prefect.events.schemas.automations import EventTrigger

    trigger = EventTrigger(
        expect={"prefect.flow-run.Crashed"},
        match=_match_labels({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=_match_deployments(*(one for name, one in ids.items() if name.startswith("post-training/"))),
        for_each={"prefect.resource.id"},
    )
    crashed = {"__prefect_kind": "jinja", "template": "{{ flow_run.id }}"}
    action = RunDeployment(deployment_id=ids[f"recover/{deployment}"], parameters={"flow_run_id": crashed})
    return _build_automation(f"rollflow: {deployment}: crashed supervisors start again", trigger, action)


def _build_automation(name: str, trigger: Any, action: Any) -> Any:
    """Build a Prefect automation whose description contains a digest of its content, so that changes are detected."""
    from prefect.events.schemas.automations import AutomationCore

    fields = trigger.model_dump(mode="json", exclude={"id"})
    # Prefect dumps these sets in arbitrary order; sorting them makes the digest stable.
    fields |= {key: sorted(fields[key]) for key in ("after", "expect", "for_each")}
    content = {"name": name, "trigger": fields, "actions": [action.model_dump(mode="json")]}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    # The automation is validated from a dict, because an update sends only the fields that were set.
    return AutomationCore.model_validate(content | {"description": f"installed by rollflow ({digest})"})


def _match_deployments(*deployments: UUID) -> Any:
    which = sorted(f"prefect.deployment.{one}" for one in deployments)
    return _match_labels({"prefect.resource.role": "deployment", "prefect.resource.id": which})


def _match_labels(labels: Mapping[str, Any]) -> Any:
    from prefect.events.schemas.events import ResourceSpecification

    return ResourceSpecification(dict(labels))
