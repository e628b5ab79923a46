"""The Ray cluster: attaching to one, finding and ending actors, waiting for them within a deadline.

Guarantees:
- `attach` either attaches within its deadline or raises `Unreachable`; Ray by itself retries a wrong address for
  ever. A head may be away until then: a caller that works for a run passes the run's `recovery` window. `attach`
  leaves this process's SIGTERM and SIGINT handlers as they were: Ray replaces them, and a cancelled flow
  would end as crashed.
- No wait for an actor is unbounded (`call`); an error names what was waited for, on whom and how long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from rollflow.flows.services.actor_process import explain_lost_call
from rollflow.flows.services.ray_access import check_token
from rollflow.flows.services.reachability import LOOPBACK, speaks_http2
from rollflow.storage.errors import ConfigError, RollflowError, Unreachable

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # deadline of one answer of the head
LOST_SECONDS = 2.0  # how often a call checks whether its actor can still be created


def attach(address: str, namespace: str, *, deadline_seconds: float = 30.0) -> None:
    """Connect this process to the cluster at `address` (host:port). Attaching again does nothing.

    Raises:
        ConfigError: it refuses this process's token, or is of another version of Ray or Python.
        Unreachable: nothing there answers like a Ray head, or it refuses.
    """
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    limit = time.monotonic() + deadline_seconds
    while not _try_attach(address, namespace, deadline_seconds, last=time.monotonic() > limit):
        time.sleep(POLL_SECONDS)


def _try_attach(address: str, namespace: str, deadline_seconds: float, *, last: bool) -> bool:
    """Connect, and return whether that succeeded; the `last` try raises why it did not."""
    try:
        _prove(address, deadline_seconds)
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
        detach()  # undo what Ray has begun, so that another try is possible
        if "Version mismatch" in str(error):
            raise ConfigError(f"cluster.address = {address!r}: {' '.join(str(error).split())}") from None
        raise Unreachable(f"the Ray cluster at {address} refused this process: {_first_line(error)}") from error
    finally:
        _restore(handlers)


def _prove(address: str, deadline_seconds: float) -> None:
    """Check that the head answers where Ray will look for it, and make Ray look on loopback where it must."""
    from ray._private import ray_constants
    from ray._private import services as ray_services

    host, _, port = address.rpartition(":")
    if not speaks_http2(host, int(port), seconds=min(deadline_seconds, ANSWER_SECONDS)):
        raise Unreachable(f"waited {deadline_seconds:.0f} s for a Ray head at {address}; nothing there answers")
    if os.environ.get("ROLLFLOW_RAY_ADDRESS") != address:  # not the private one, whose token this process was given
        check_token(address)
    if host in LOOPBACK and not speaks_http2(ray_services.get_node_ip_address(), int(port), seconds=1.0):
        # Ray takes "127.0.0.1" for the host's outside address unless clusters are off; this head is on loopback only.
        ray_constants.ENABLE_RAY_CLUSTER = False


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        # None: a handler not set from Python; ValueError: not the main thread, where Ray set none either.
        if handler is not None:
            with contextlib.suppress(ValueError):
                signal.signal(number, handler)


def detach() -> None:
    """Disconnect from the cluster; detached actors live on."""
    import ray

    ray.shutdown()


@contextlib.contextmanager
def attached(address: str, namespace: str, *, deadline_seconds: float = 30.0) -> Iterator[None]:
    """`attach` for the length of a block."""
    attach(address, namespace, deadline_seconds=deadline_seconds)
    try:
        yield
    finally:
        detach()


def actor(name: str) -> Any:
    """The living actor of that name in the namespace that this process is attached to.

    Raises:
        Unreachable: there is none.
    """
    import ray

    try:
        return ray.get_actor(name)
    except ValueError as error:
        where = ray.get_runtime_context().namespace
        raise Unreachable(f"no actor {name!r} lives in the namespace {where!r} of the Ray cluster") from error


def kill_named(names: Iterable[str], *, deadline_seconds: float = 10.0) -> list[str]:
    """Kill the actors of these names and see their names free; those that are gone already are skipped.

    Returns the names of those that were killed. The wait for a name to become free is bounded: its node may have been
    lost a moment ago. Whoever then starts an actor of that name finds the dead one, and comes back here.
    """
    import ray

    killed = []
    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name), no_restart=True)
            killed.append(name)
    limit = time.monotonic() + deadline_seconds
    while time.monotonic() < limit and any(map(_named, killed)):
        time.sleep(0.02)
    return killed


def kill(actor: Any) -> None:
    """End an actor that this process has started; one that has ended already is no error."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)


def _named(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def call(reference: Any, deadline_seconds: float, what: str, *, died: type[RollflowError] = Unreachable) -> Any:
    """Wait for an object reference, for at most `deadline_seconds`, and return its value.

    Args:
        what: what is waited for and on whom, as it should stand in the error ("the weights, from engine 0").
        died: the error to raise if the actor is dead (`EngineFailed` for engines).

    Raises:
        Unreachable: no answer in time, or the actor's worker died before there was an actor.
        RollflowError: the one that the actor's method raised.
    """
    import ray

    limit = time.monotonic() + deadline_seconds
    try:
        while not done(reference, max(0.0, min(limit - time.monotonic(), LOST_SECONDS))):
            if why := explain_lost_call(reference):
                raise died(f"waited for {what}: {why}")
            if time.monotonic() > limit:
                break
        with _as_raised():
            return ray.get(reference, timeout=0)
    except ray.exceptions.RayError as error:
        _translate(error, deadline_seconds, what, died)


def done(reference: Any, seconds: float) -> bool:
    """Whether a call has ended (with a value or an error), waited for at most `seconds`."""
    import ray

    with _as_raised():
        return bool(ray.wait([reference], timeout=seconds)[0])


@contextlib.contextmanager
def _as_raised() -> Iterator[None]:
    """What the handler of a signal raises within Ray's compiled code, by which a flow run is cancelled, say.

    It comes from there as the cause of a `SystemError`, which would be taken for the end of an actor.
    """
    try:
        yield
    except SystemError as error:
        raise error.__cause__ or error from None


def living_nodes() -> list[dict[str, Any]]:
    """The cluster's living nodes, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def nodes() -> list[str]:
    """Addresses of the cluster's living nodes."""
    return [str(node["NodeManagerAddress"]) for node in living_nodes()]


def node_gpus() -> list[float]:
    """How many GPUs each living node has."""
    return [float(node["Resources"].get("GPU", 0.0)) for node in living_nodes()]


def check_runtime_env(tree: Mapping[str, Any]) -> None:
    """Check `cluster.runtime_env` as Ray does where an actor starts.

    Raises:
        ConfigError: Ray would refuse it.
    """
    from ray.runtime_env import RuntimeEnv

    try:
        RuntimeEnv(**tree)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cluster.runtime_env = {dict(tree)!r}: {_first_line(error)}; correct it") from None


def count_machine_gpus() -> float:
    """Count the GPUs that a Ray node on this machine would have; no cluster is needed."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    return float(get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators())


def _translate(error: Exception, deadline_seconds: float, what: str, died: type[RollflowError]) -> NoReturn:
    from ray import exceptions

    if isinstance(error, exceptions.GetTimeoutError):
        raise Unreachable(f"waited {deadline_seconds:g} s for {what}") from error
    if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, RollflowError):
        raise error.cause from error
    if isinstance(error, exceptions.RayActorError | exceptions.ObjectLostError | exceptions.WorkerCrashedError):
        raise died(f"waited for {what}, but its process is gone: {_first_line(error)}") from error
    raise error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
