"""Checks reference answers in separate processes, because some checks never end or take all memory.

    find --reference, as a line of JSON--> process --what is wrong, as a line of JSON--> find

A check that exceeds `reward.deadline_seconds` is killed with its process, and the row is rejected. After `MOST_ENDED`
such rows no further row is checked, because the file is rejected anyway.

The process is started as `python -m rollflow.tasks.scorers.reference_process REWARD`, with the `[reward]` section as
JSON.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter

from rollflow.storage.errors import ConfigError
from rollflow.tasks.runtime.memory_limit import limit_memory
from rollflow.tasks.scorers.config import CodeReward, MathsReward, RewardConfig
from rollflow.tasks.scorers.references import find_reference_fault, is_quick

REWARD: TypeAdapter[RewardConfig] = TypeAdapter(RewardConfig)
MOST_ENDED = 3
MEMORY_BYTES = 4 * 2**30  # memory limit of a checking process, in bytes
EXAMPLES: Mapping[str, Mapping[str, Any]] = {"maths": {"answer": "x"}, "code": {"cases": [{"assert": "pass"}]}}


class ReferenceChecker:
    """Finds reference answers that no response can match; must be used in a `with` statement."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # key: the `[reward]` section as JSON
        self._ended = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for reward in list(self._processes):
            self._end(reward)

    def find(self, config: RewardConfig, reference: Mapping[str, Any]) -> str | None:
        """Return the reason why no response can match this reference, or None if a response can match it."""
        if not isinstance(config, MathsReward | CodeReward) or is_quick(config, reference):
            return find_reference_fault(config, reference)
        if self._ended >= MOST_ENDED:
            return None
        reward = config.model_dump_json()
        if reward not in self._processes:
            self._start(reward, config)
        found = self._ask(reward, reference, config.deadline_seconds)
        if found is not None:
            return found[0]
        self._ended += 1
        code = self._end(reward)
        if code is None:
            limit = f"reward.deadline_seconds = {config.deadline_seconds:g}"
            what = f"its check did not end within {limit}, and scoring a response would take as long"
        else:
            what = f"its check ended the process that checked it, with exit code {code}"
        return f"{what}; correct the row, or remove it"

    def _start(self, reward: str, config: RewardConfig) -> None:
        """Start a checking process, and let it check an example, so that all modules are imported before the first
        deadline begins.
        """
        command = [sys.executable, "-m", __name__, reward]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._processes[reward] = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
        )
        if self._ask(reward, EXAMPLES[config.kind], config.start_seconds) is None:
            self._end(reward)
            raise ConfigError(
                f"reward.start_seconds = {config.start_seconds:g}: the process that checks the rows did not start in "
                "this time; set more seconds"
            )

    def _ask(self, reward: str, reference: Mapping[str, Any], seconds: float) -> list[str | None] | None:
        """Return the answer of the checking process in a list, or None if the process has ended or does not answer in
        time.
        """
        process = self._processes[reward]
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(dict(reference)).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        if not select.select([process.stdout], [], [], seconds)[0]:
            return None
        line = process.stdout.readline()
        return [json.loads(line)] if line else None

    def _end(self, reward: str) -> int | None:
        """End a checking process and return its exit code, or None if the process was still running."""
        process = self._processes.pop(reward)
        assert process.stdout is not None
        # The pipe of a process that has ended is readable.
        is_running = not select.select([process.stdout], [], [], 0)[0]
        if is_running:
            process.kill()
        process.communicate()
        return None if is_running else process.returncode


def main() -> None:
    """Check reference answers that arrive on the standard input, until the input ends."""
    config = REWARD.validate_json(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries must not print to stdout, where output would be read as an answer
    find_reference_fault(config, EXAMPLES[config.kind])
    limit_memory(MEMORY_BYTES)
    for line in sys.stdin:
        try:
            found = find_reference_fault(config, json.loads(line))
        except Exception as error:  # noqa: BLE001 - a library may raise any error on an odd reference
            found = f"its check failed ({type(error).__name__}: {error}); correct the row, or remove it"
        answers.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
