"""Unpacks small runs that earlier releases recorded as archives, and records such archives.

Each archive in `tests/fixtures/runs` has one run's storage: log, policies, learner states, trajectories and the records
beside the log. An archive is never recorded again, because it proves that this release reads what an earlier release
wrote. Add new archives for a new storage format:

    python -m tests.support.recorded FOLDER [NAME ...]     # some minutes a run; archives are written to FOLDER

A run is trained for two versions, and then resumed for a third version by a changed config. The archive does not
contain `reward.png`.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import s3fs

RUNS = Path(__file__).parents[1] / "fixtures/runs"
NAMES = ("whole", "ranks", "bucket")  # whole weights; two ranks with sharded weights and a critic; written through S3
VERSIONS = 3
BUCKET = "recorded"


def unpack(name: str, folder: Path) -> Path:
    """Copy the recorded run `name` to the store in `folder`; return the run's own folder."""
    run = folder / "runs" / name
    with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(run, filter="data")
    return run


def pack(files: Iterator[tuple[str, bytes]], to: Path) -> None:
    """Write an archive of objects, by their paths in the run's storage."""
    with tarfile.open(to, "w:xz", preset=9) as archive:
        for path, data in files:
            if path != "reward.png":
                member = tarfile.TarInfo(path)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def record(name: str, home: Path, to: Path) -> None:
    """Record the run `name` by the command line, and pack it."""
    if name == "bucket":
        _record_in_bucket(home, to)
        return
    _run_commands(name, home, {}, str(home / "store"))
    run = home / "store/runs" / name
    paths = sorted(path for path in run.rglob("*") if path.is_file())
    pack(((path.relative_to(run).as_posix(), path.read_bytes()) for path in paths), to)


def _record_in_bucket(home: Path, to: Path) -> None:
    from tests.support.s3_server import s3_server

    with s3_server(BUCKET) as endpoint:
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_ENDPOINT_URL_S3": endpoint}
        _run_commands("bucket", home, keys, f"s3://{BUCKET}/team")
        system = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=endpoint, skip_instance_cache=True)
        prefix = f"{BUCKET}/team/runs/bucket/"
        paths = sorted(system.find(prefix))
        pack(((path.removeprefix(prefix), system.cat_file(path)) for path in paths), to)


def _run_commands(name: str, home: Path, variables: dict[str, str], store: str) -> None:
    environment = {**os.environ, **variables, "ROLLFLOW_HOME": str(home), "LOGNAME": "recorder"}
    rollflow = [sys.executable, "-m", "rollflow.flows.commands.cli"]
    home.mkdir(exist_ok=True)
    for file in ("questions.jsonl", f"{name}.toml"):  # the run records the path of its file of questions
        shutil.copy(RUNS / file, home)
    recipe = home / f"{name}.toml"
    for arguments in (
        ["run", str(recipe), "--run-id", name, "--set", f"store.uri={store}"],
        ["resume", name, "--store", store, "--set", f"versions={VERSIONS}"],
    ):
        subprocess.run([*rollflow, *arguments], env=environment, check=True)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or NAMES:
        with tempfile.TemporaryDirectory() as scratch:
            record(chosen, Path(scratch), Path(sys.argv[1]) / f"{chosen}.tar.xz")
