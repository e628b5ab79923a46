"""What the tests of `infra/` share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.aws_server import aws_server
from tests.support.terraform import PLANTED, prepare


@pytest.fixture(scope="package")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The plan of the cluster, made with secrets of one's own."""
    with aws_server() as endpoint:
        yield prepare("cluster", tmp_path_factory.mktemp("cluster"), endpoint, PLANTED).plan()
