"""Defines the fixture `box`, which starts sandboxes for the tests in this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import bubblewrap
from rollflow.tasks.sandboxes.base import Program
from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes
from tests.sandboxes.box import CONFIG, KINDS, PYTHON, SECRET, Box, build_as_user


@pytest.fixture(scope="module", params=KINDS)
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """Start sandboxes as this user and, if this user is root, as an ordinary user, too; skip what this machine cannot
    run.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ordinary user":
            if os.geteuid() != 0 or not shutil.which("setpriv") or not os.path.exists(f"/usr/bin/{PYTHON}"):
                pytest.skip(f"not root, or no setpriv, or no /usr/bin/{PYTHON}")
            patch.setattr(bubblewrap, "build_command", build_as_user(bubblewrap.build_command))
        created = Box(BubblewrapSandboxes(CONFIG))
        try:
            created.do(created.sandboxes.start())
        except ConfigError as error:
            created.close()
            pytest.skip(str(error))
        created.do(created.sandboxes.run(Program(code=f"# {SECRET}", stdin=SECRET.encode(), env={"LEFT": SECRET})))
        yield created
        created.close()
