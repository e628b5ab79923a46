"""Connects this process to a Ray cluster, finds and kills Ray actors, and waits for results of actors with a time
limit.

* `attach` connects within its time limit or raises `Unreachable`, whereas Ray itself retries a wrong address forever.
  During a run, callers of `attach` pass a longer time limit (`recovery`), because the Ray head may be restarting.
* `attach` keeps this process's SIGTERM and SIGINT handlers, although Ray replaces them. With Ray's signal handlers,
  Prefect would report a cancelled flow run as crashed.
* `call_within` limits the time that this process waits for a Ray actor. The error of `call_within` names the expected
  result, the actor and the waiting time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, get_args

from rollflow.flows.ray_cluster.actor_process import explain_lost_call
from rollflow.flows.ray_cluster.ray_access import check_token
from rollflow.flows.services.reachability import LOOPBACK, speaks_http2
from rollflow.storage.errors import ConfigError, RollflowError, Unreachable
from rollflow.tasks.actors.placement import LEAST, Role
from rollflow.tasks.run.cluster_config import ClusterConfig

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # longest wait in seconds for one answer of the Ray head
LOST_SECONDS = 2.0  # seconds between checks whether the called Ray actor can still be created


def attach(address: str, namespace: str, *, deadline_seconds: float = 30.0) -> None:
    """Connect this process to the Ray cluster at `address` (host:port). Attaching again does nothing.

    Raises:
        ConfigError: the Ray head rejects this process's token, or runs another version of Ray or Python.
        Unreachable: no Ray head answers at the address, or the head refuses the connection.
    """
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    limit = time.monotonic() + deadline_seconds
    while not _try_attach(address, namespace, deadline_seconds, last=time.monotonic() > limit):
        time.sleep(POLL_SECONDS)


def _try_attach(address: str, namespace: str, deadline_seconds: float, *, last: bool) -> bool:
    """Connect to a Ray cluster; if the connection fails, return False, or raise the error if `last` is true."""
    try:
        _check_head(address, deadline_seconds)
        _keep_loopback(address)
        _connect(address, namespace)
    except Unreachable:
        if last:
            raise
        return False
    return True


def _connect(address: str, namespace: str) -> None:
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, namespace=namespace, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        detach()  # clean up after the failed `ray.init`, so that another try is possible
        if "Version mismatch" in str(error):
            raise ConfigError(f"cluster.address = {address!r}: {' '.join(str(error).split())}") from None
        raise Unreachable(f"the Ray cluster at {address} refused the connection: {_first_line(error)}") from error
    finally:
        _restore_handlers(handlers)


def _check_head(address: str, deadline_seconds: float) -> None:
    """Check that a Ray head answers at the address and accepts this process's token."""
    host, _, port = address.rpartition(":")
    if not speaks_http2(host, int(port), seconds=min(deadline_seconds, ANSWER_SECONDS)):
        raise Unreachable(
            f"nothing answers at {address} within {deadline_seconds:.0f} s; check the address, and that a Ray "
            "head runs there"
        )
    # The token of a private Ray cluster needs no check, because this process has the token in its environment.
    if os.environ.get("ROLLFLOW_RAY_ADDRESS") != address:
        check_token(address)


def _keep_loopback(address: str) -> None:
    """Make Ray connect over loopback if the Ray head listens on loopback only."""
    from ray._private import ray_constants
    from ray._private import services as ray_services

    host, _, port = address.rpartition(":")
    if host in LOOPBACK and not speaks_http2(ray_services.get_node_ip_address(), int(port), seconds=1.0):
        # If `ENABLE_RAY_CLUSTER` were True, Ray would replace 127.0.0.1 by the machine's outside address.
        ray_constants.ENABLE_RAY_CLUSTER = False


def _restore_handlers(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        # `getsignal` returns None for handlers that Python did not set; `signal` fails in other threads.
        if handler is not None:
            with contextlib.suppress(ValueError):
                signal.signal(number, handler)


def detach() -> None:
    """Disconnect this process from the Ray cluster; detached actors keep running."""
    import ray

    ray.shutdown()


@contextlib.contextmanager
def attached_cluster(address: str, namespace: str, *, deadline_seconds: float = 30.0) -> Iterator[None]:
    """Connect this process to the Ray cluster during a `with` block; see `attach`."""
    attach(address, namespace, deadline_seconds=deadline_seconds)
    try:
        yield
    finally:
        detach()


def find_actor(name: str) -> Any:
    """Return the living Ray actor with this name in this process's namespace.

    Raises:
        Unreachable: no living Ray actor has this name.
    """
    import ray

    try:
        return ray.get_actor(name)
    except ValueError as error:
        where = ray.get_runtime_context().namespace
        raise Unreachable(f"the Ray cluster has no actor with the name {name!r} in the namespace {where!r}") from error


def kill_named(names: Iterable[str], *, deadline_seconds: float = 10.0) -> list[str]:
    """Kill the Ray actors with these names, and wait until the names can be used again; skip unknown names.

    Returns the names of the killed actors. The function waits for at most `deadline_seconds`, because a lost node may
    never release an actor's name.
    """
    import ray

    killed = []
    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name), no_restart=True)
            killed.append(name)
    limit = time.monotonic() + deadline_seconds
    while time.monotonic() < limit and any(map(_name_is_taken, killed)):
        time.sleep(0.02)
    return killed


def kill(actor: Any) -> None:
    """Kill a Ray actor that this process has started; do nothing if the actor has already ended."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)


def _name_is_taken(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def call_within(reference: Any, deadline_seconds: float, what: str, *, died: type[RollflowError] = Unreachable) -> Any:
    """Return the result of a remote Ray call, waiting for at most `deadline_seconds`.

    `what` describes the expected result for the error message, such as "the weights, from engine 0". `died` is the type
    of the error that is raised if the Ray actor is dead (`EngineFailed` for engines).

    Raises:
        Unreachable: the Ray actor did not answer in time, or its worker process died before the actor was created.
        RollflowError: the error that the actor's method raised.
    """
    import ray

    limit = time.monotonic() + deadline_seconds
    try:
        while not has_ended(reference, max(0.0, min(limit - time.monotonic(), LOST_SECONDS))):
            if why := explain_lost_call(reference):
                raise died(f"cannot wait any longer for {what}: {why}")
            if time.monotonic() > limit:
                break
        with _unwrap_signal_error():
            return ray.get(reference, timeout=0)
    except ray.exceptions.RayError as error:
        _raise_translated(error, deadline_seconds, what, died)


def has_ended(reference: Any, seconds: float) -> bool:
    """Return whether a remote Ray call has ended, with a result or an error, waiting for at most `seconds`."""
    import ray

    with _unwrap_signal_error():
        return bool(ray.wait([reference], timeout=seconds)[0])


@contextlib.contextmanager
def _unwrap_signal_error() -> Iterator[None]:
    """Raise the error that a signal handler raised inside Ray's compiled code.

    Ray wraps such an error in a `SystemError`, which would look like the death of an actor.
    """
    try:
        yield
    except SystemError as error:
        raise error.__cause__ or error from None


def living_nodes() -> list[dict[str, Any]]:
    """Return Ray's descriptions of all living nodes of the Ray cluster."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def list_nodes() -> list[str]:
    """Return the addresses of all living nodes of the Ray cluster."""
    return [str(node["NodeManagerAddress"]) for node in living_nodes()]


def node_gpus() -> list[float]:
    """Return the number of GPUs of each living node of the Ray cluster."""
    return [float(node["Resources"].get("GPU", 0.0)) for node in living_nodes()]


def check_actor_options(config: ClusterConfig) -> None:
    """Check the labels, the resources and the `runtime_env` in the config section `[cluster]`, as Ray does when it
    starts an actor.

    Raises:
        ConfigError: Ray would reject a label, a resource or the `runtime_env`.
    """
    options = [("runtime_env", "runtime_env", config.runtime_env, config.runtime_env)]
    for role in get_args(Role):
        own, key = getattr(config.placement, role), f"placement.{role}"
        options.append((f"{key}.labels", "label_selector", own.labels, own.labels))
        options.append((f"{key}.resource", "resources", own.resource, {own.resource: LEAST}))
    given = [one for one in options if one[2]]
    if not given:  # there are no values to check, and importing Ray would take seconds
        return
    import ray

    actor: Any = ray.remote(type("Actor", (), {}))
    for key, name, value, option in given:
        try:
            actor.options(**{name: dict(option)})
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cluster.{key} = {value!r}: {_first_line(error)}; correct the value") from None


def count_machine_gpus() -> float:
    """Return the number of GPUs that a Ray node on this machine would offer, without a Ray cluster."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    return float(get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators())


def _raise_translated(error: Exception, deadline_seconds: float, what: str, died: type[RollflowError]) -> NoReturn:
    from ray import exceptions

    if isinstance(error, exceptions.GetTimeoutError):
        raise Unreachable(f"no answer came within {deadline_seconds:g} s, while waiting for {what}") from error
    if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, RollflowError):
        raise error.cause from error
    if isinstance(error, exceptions.RayActorError | exceptions.ObjectLostError | exceptions.WorkerCrashedError):
        raise died(f"cannot wait for {what}, because its process is gone: {_first_line(error)}") from error
    raise error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
