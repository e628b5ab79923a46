"""Tests the memory of a sharded learner: each process has only a part of a policy version in memory while the version
is stored, loaded or evaluated.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from transformers import Qwen2Config

from rollflow.storage.objects.base import split_buffers
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner
from rollflow.tasks.run.config_switch import MappedFiles
from rollflow.tasks.run.restore import list_files
from rollflow.testing.learners import batch

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports the peak memory of a process"),
]

FILE = 2**22  # largest size in bytes of the tensors in one file, unless a single tensor is larger
FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed memory is released at once
SIDE = """
import json, sys
from pathlib import Path
from tests.tasks.test_memory_in_parts import SIDES
if __name__ == "__main__":
    print(json.dumps(SIDES[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))))
"""


def described(folder: Path, *, tied: bool = True, **shape: int) -> Path:
    Qwen2Config(
        **{"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, **shape},
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a policy of 17 million parameters, with no tensor of more than a million."""
    found = tmp_path_factory.mktemp("policy")
    return described(found, vocab_size=400, intermediate_size=1024, num_hidden_layers=16)


def begun(folder: Path, *, blank: bool) -> MultiRankLearner:
    config = TorchTrain(sharded=True, ranks=2, warmup_versions=0)
    start = LearnerStart(folder, trained=False, blank=blank, versions=9, shard_bytes=FILE)
    made = build_learner(config, start)
    assert isinstance(made, MultiRankLearner)
    return made


def pids(made: MultiRankLearner) -> list[int]:
    """Return the process ids of all ranks, beginning with the first rank."""
    return [os.getpid(), *(one.process.pid for one in made._others._started.values())]


def memory(pid: int, what: str) -> int:
    """Return a process's memory in bytes: the current (VmRSS) or the peak (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


class Most:
    """The peak memory of processes after the creation of this object, minus their memory at its creation."""

    def __init__(self, of: Iterable[int]) -> None:
        gc.collect()
        self._before = {pid: memory(pid, "VmRSS") for pid in of}
        for pid in self._before:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def found(self) -> list[int]:
        """Return the peak of each process, in the order of the processes."""
        return [memory(pid, "VmHWM") - before for pid, before in self._before.items()]


def stores(policy: Path, folder: Path) -> list[int]:
    """Take a train step and write the files of the new version one after the other; return the peak memory of each
    process.
    """
    made = begun(policy, blank=False)
    made.step(batch(0), 0)
    most, given = Most(pids(made)), list_files(made)
    for name in given:
        with (folder / name.replace("/", "-")).open("wb") as file:
            file.writelines(split_buffers(given[name]))
    return most.found()


def loads(policy: Path, folder: Path) -> list[int]:
    """Load the files that `stores` has written; return the peak memory of each process."""
    weights, state = (
        MappedFiles({path.name.replace("-", "/", 1): path for path in folder.glob(f"{part}-*")})
        for part in ("weights", "learner")
    )
    made = begun(policy, blank=True)
    most = Most(pids(made))
    made.load(weights, state)
    return most.found()


def looks(policy: Path, _: Path) -> list[int]:
    """Compute log-probs after a train step; return the peak memory of each process."""
    made = begun(policy, blank=False)
    made.step(batch(0), 0)  # before the first step, the first rank has the whole model
    most = Most(pids(made))
    made.logprobs(range(3, 19))
    return most.found()


SIDES = {"stores": stores, "loads": loads, "looks": looks}


def side(name: str, policy: Path, folder: Path) -> list[int]:
    """Run one of the measurements `SIDES` in a process of its own, and return its result."""
    command = [sys.executable, "-c", SIDE, name, str(policy), str(folder)]
    done = subprocess.run(command, env={**os.environ, **FREED}, capture_output=True, text=True, check=True)
    return [int(most) for most in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.soak
def test_no_learner_process_has_all_weights_in_memory(folder: Path, tmp_path: Path) -> None:
    """Storing a version needs memory for one or two files. Loading needs memory for half of the version (there are two
    ranks), one or two files, and late imports.
    """
    most = side("stores", folder, tmp_path)
    whole = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert max(most) < 5 * FILE < whole / 8
    assert max(side("loads", folder, tmp_path)) < 0.75 * whole


@pytest.mark.soak
@pytest.mark.parametrize("tied", [True, False])
def test_sharded_embeddings_are_kept_once_in_memory(tied: bool, tmp_path: Path) -> None:
    """Without the patch, FSDP would keep an embedding twice in memory. Embeddings that are not tied are gathered in
    addition to the output head.
    """
    policy = described(tmp_path, tied=tied, vocab_size=40_000, intermediate_size=256, num_hidden_layers=2)
    whole = 40_000 * 256 * 4 * (1 if tied else 2)
    assert 0.9 * whole < max(side("looks", policy, tmp_path)) < 1.25 * whole
