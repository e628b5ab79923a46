"""Keeps the services of a command such as `rollflow run` running. Each service is checked about once a second, and is
restarted if it died or hangs.

    Prefect server    restarted on its port, with its database
    Ray head          restarted at its address without actors; the flows attached to the old head end with it
    runner            restarted; its flow runs ended with it, and are marked as crashed
    others            restarted

If a service was already restarted too often, the session ends with the error `RestartsExhausted`. This module does not
watch supervisors or stages: `recover` restarts a crashed supervisor, and the supervisor restarts a crashed stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rollflow.flows.keepalive.restarts import Outage, RestartBudget, Restarts, RestartsExhausted
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.registration.prefect_api import crash_orphans
from rollflow.flows.services.process import PrefectServer, Service
from rollflow.storage.errors import Unreachable
from rollflow.storage.run_records.recoveries import Recovery
from rollflow.tasks.run.config import RecoveryConfig

SERVER, RAY, RUNNER = "prefect server", "ray head", "runner"
REDONE = {SERVER: "nothing", RAY: "what the actors had in memory", RUNNER: "the actors' data in memory"}


class ServiceKeeper:
    """Restarts the services of one command, such as its Prefect server. A service is restarted after the services that
    it depends on.
    """

    def __init__(self, deployment: str, services: Mapping[str, Service], limits: RecoveryConfig) -> None:
        self.deployment, self.services, self._limits = deployment, services, limits
        # Each command counts the restarts of services from 0, because services end with their command.
        self.restarts = Restarts(RestartBudget(limits))
        self._answered: dict[str, float] = {}
        # Monotonic time of the Ray head's last failure. All flows that were connected to the Ray head then lost their
        # actors.
        self.cluster_lost_at = 0.0

    def look(self, record: Callable[[Recovery], None]) -> None:
        """Advance the restart of every service that is down by one step, without waiting.

        Raises:
            RestartsExhausted: a service was restarted too often.
        """
        for role, service in self.services.items():
            outage = self.restarts.outage(role)
            if outage is None and (reason := self._check_service(role, service)):
                outage = self._begin_outage(role, reason)
            if outage is None:
                continue
            if outage.launched is None:
                self._launch(role, service, outage)
            elif service.answers:
                if recovery := self.restarts.mark_up(role):
                    record(recovery)
            elif not service.running or time.monotonic() - outage.launched > service.start_seconds:
                self._down(role, f"{service.what} does not start; see {service.log}")

    def _check_service(self, role: str, service: Service) -> str:
        """Check whether the service answers. Return the reason why the service must be restarted, or "" if the service
        works.
        """
        now = time.monotonic()
        if not service.running:
            return "its process ended"
        if not isinstance(service, PrefectServer | RayHead) or service.answers:
            self._answered[role] = now
            return ""
        silent = now - self._answered.setdefault(role, now)
        return f"it did not answer for {silent:.0f} s" if silent > self._limits.answer_seconds else ""

    def _begin_outage(self, role: str, reason: str) -> Outage:
        outage = self._down(role, reason)
        if role == RAY:
            self.cluster_lost_at = outage.pending.noticed
            # Killing the Prefect runner ends its flows, which might otherwise wait for actors that are gone.
            self.services[RUNNER].kill()
        return outage

    def _down(self, role: str, reason: str) -> Outage:
        return self.restarts.mark_down(role, reason, REDONE.get(role, "nothing"))

    def _launch(self, role: str, service: Service, outage: Outage) -> None:
        if not self.restarts.may_start(role):
            return
        try:
            if role == RUNNER:
                crash_orphans(self.deployment, f"the {RUNNER} died")
        except Unreachable as error:  # The Prefect server is down, too, and must be restarted before the runner.
            if time.monotonic() - outage.pending.noticed > self._limits.window_seconds:
                raise RestartsExhausted(f"the {RUNNER} died and cannot be restarted: {error}") from error
            return
        service.relaunch()
        self.restarts.mark_launched(role)
        self._answered[role] = time.monotonic()
