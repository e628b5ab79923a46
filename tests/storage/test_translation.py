"""Errors that replace errors of the operating system."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from rollflow.storage.errors import Missing
from rollflow.storage.objects.local import LocalStore


class Held:
    """An object of a function that reads a missing object."""


def read_missing(store: LocalStore) -> weakref.ref[Held]:
    held = Held()
    with pytest.raises(Missing):
        store.get("missing")
    return weakref.ref(held)


def test_error_of_a_missing_object_holds_no_object_of_its_caller(tmp_path: Path) -> None:
    """The object is freed without a garbage collection."""
    gc.disable()
    try:
        assert read_missing(LocalStore(tmp_path))() is None
    finally:
        gc.enable()
