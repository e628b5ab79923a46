"""Defines the fixtures and settings that tests share. Tests of one group share servers, and run in the same process of
`pytest -n`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.counts import ALL
from tests.support.full_tests import GROUP, mark_listed

if TYPE_CHECKING:
    from rollflow.flows.services.process import PrefectServer

# Hypothesis sets no time limit, because a machine may be slow. `make test` draws the same cases each time, so that only
# a change of the code can change its result; `make soak` draws new cases.
settings.register_profile(
    "calm", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not ALL, print_blob=True
)
settings.load_profile("calm")

FSYNC = os.fsync

# A forked child has none of its parent's threads. If the child collected an object that belongs to them, such as a
# group of gloo, it would wait for these threads forever.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

# Tests create many objects and few reference cycles. With Python's default thresholds, the collector takes a fifth of
# the CPU time of the simulations.
gc.set_threshold(100_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    """Let `--last-failed` find the tests of a group, which an earlier run stored with the group's name in the id."""
    last = config.pluginmanager.get_plugin("lfplugin")
    if last is not None:
        last.lastfailed = {type(id).parse(GROUP.sub("", str(id))): True for id in last.lastfailed}
        if config.getoption("lf"):
            config.pluginmanager.register(SkippedRepeats(last))


class SkippedRepeats:
    """Keeps a failed test in the list of `--last-failed` if the test is skipped when it is repeated; pytest removes it.

    `make again` fails as long as the list contains a test.
    """

    def __init__(self, last: Any) -> None:
        self._last = last

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a skipped test to the list."""
        if report.skipped:
            self._last.lastfailed[report.id] = True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark the tests that only `make full` runs, and name each test's group at the end of its id for pytest-xdist.

    pytest-xdist 3.8 puts the group into an attribute that pytest does not read since 9.2. Without the name in the id,
    the tests of a group run in several processes, without an error (pytest-xdist issue 1386). `tests/test_groups.py`
    tests that the groups stay together.
    """
    all_tests = config.args == config.getini("testpaths") and not config.getoption("lf", False)
    mark_listed(items, complete=all_tests)
    yield
    if not config.getoption("loadgroup", False):
        return
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
            item._id = type(item.id).parse(f"{item.nodeid}@{group.args[0]}")


@pytest.fixture(scope="session")
def ray_node() -> Iterator[None]:
    """One Ray node for all tests of this process that do not kill it. Each test ends the actors that it starts."""
    import ray

    ray.init(
        "local", num_cpus=2, namespace="tests", include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a new Prefect database, which `give` copies for a test. All test processes share the folder."""
    from tests.support.prefect_home import migrated

    own = tmp_path_factory.getbasetemp()
    return migrated((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "prefect-database")


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[PrefectServer]:
    """One Prefect server for the tests of the group `prefect`, except tests that list all deployments of their server.

    A test uses the server by calling `tests.support.prefect_home.use_server`.
    """
    from rollflow.flows.services.process import PrefectServer
    from tests.support.prefect_home import give

    home = tmp_path_factory.mktemp("prefect")
    give(prefect_database, home)
    with PrefectServer(home) as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def skip_syncs() -> Iterator[None]:
    """Turn off `os.fsync` in this process and in its forked children, because syncs take up to half of a test's time.

    No test cuts the power, and the kernel keeps the writes of a killed process. The fixture `real_syncs` turns syncs on
    again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def real_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test sync files to the disk."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture(autouse=True)
def forget_memory_stores() -> Iterator[None]:
    """Delete the objects that a test wrote into stores in memory, after the test.

    Two tests in one process may then use the same name for a store. Objects that fixtures with a wider scope wrote are
    kept.
    """
    from rollflow.storage.objects import memory

    before = set(memory._OBJECTS)
    yield
    for key in memory._OBJECTS.keys() - before:
        memory._OBJECTS.pop(key, None)
