"""Kills all processes of a run with episodes of several turns, again and again, and reports what was lost.

`python -m benchmarks.turn_kills` makes 50 kills; `--minutes` ends the kills earlier. The environment of the run
(`benchmarks.witnessed_turns`) writes down each turn and each action outside of the run. A turn is lost if the
environment got it before a kill, and the policy generated it again after the kill. A token that the policy sampled in a
finished turn is accounted for if its turn was not lost; then its episode was trained on, or discarded with a reason.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.report import Row, arguments, at_least, at_most, publish
from benchmarks.victims import kill_everything
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.policies import PolicyStore
from rollflow.storage.trajectories import TrajectoryStore

ROOT = Path(__file__).parents[1]
VERSIONS = 100_000  # number of versions, so large that the run does not end before the kills
LEFT = 3  # versions that are trained after the last kill
START_SECONDS, END_SECONDS = 600.0, 900.0
AIM_SECONDS = 45.0  # target: seconds from a kill to the next version
TURNS = """
[environment]
kind = "import"
path = "benchmarks.witnessed_turns:WitnessedTurns"
options = {{ folder = "{folder}", saves = {saves} }}

[rollout]
durable_turns = "{durable}"
"""


@dataclass(slots=True)
class Witness:
    """The lines that the environment wrote up to each kill."""

    folder: Path
    ends: list[int] = field(default_factory=list)  # number of lines about turns at each kill

    def note_kill(self) -> None:
        """Note that the run was killed now."""
        self.ends.append(len(self.read("turns")))

    def read(self, file: str) -> list[str]:
        """Return the lines of a file."""
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    def count_lost(self) -> list[Counter[str]]:
        """Count the lost turns of each episode. Return a counter for each life of the run (the time between two kills),
        which has the turns that were generated again in this life.
        """
        lines, known, lives = self.read("turns"), set[str](), list[Counter[str]]()
        for begin, end in zip([0, *self.ends], [*self.ends, len(lines)], strict=True):
            turns = [line.split() for line in lines[begin:end]]
            again = {name for name, _, recalled in turns if name in known and recalled == "0"}
            lives.append(Counter(name.rpartition(".")[0] for name in again))
            known |= {name for name, _, _ in turns}
        return lives

    def count_tokens(self) -> tuple[int, dict[str, int]]:
        """Return the number of all sampled tokens, and the tokens of the newest generation of each turn."""
        sampled, newest = 0, dict[str, int]()
        for line in self.read("turns"):
            name, tokens, recalled = line.split()
            # the run may have stored a turn, and died before the environment got it
            sampled += int(tokens) if recalled == "0" or name not in newest else 0
            newest[name] = int(tokens)
        return sampled, newest


def kill_run(victim: Victim, witness: Witness, kills: int, seconds: float) -> list[float]:
    """Kill all processes of a run up to `kills` times within `seconds`. Return the seconds from each kill to the next
    version.
    """
    draw, limit, found = random.Random(), time.monotonic() + seconds, list[float]()
    victim.wait_version(1, START_SECONDS)
    while len(found) < kills and time.monotonic() < limit:
        time.sleep(draw.uniform(0.0, 2.0))
        began = time.monotonic()
        kill_everything(victim.home)
        victim.process.wait()
        witness.note_kill()
        version = victim.version()
        victim.process = victim._start("resume", "chaos")
        victim.wait_version(version + 1, START_SECONDS)
        found.append(time.monotonic() - began)
        print(f"kill {len(found)} at version {version}: {found[-1]:.1f} s to the next version", flush=True)
    return found


def end_run(victim: Victim) -> None:
    """Let the run end soon."""
    kill_everything(victim.home)
    victim.process.wait()
    victim.versions = victim.version() + LEFT
    victim.process = victim._start("resume", "chaos", "--set", f"versions={victim.versions}")


def list_trained(victim: Victim) -> set[str]:
    """Return the episodes that were trained on, as the environment names them."""
    policies, batches, found = PolicyStore(victim.log), TrajectoryStore(victim.log), set[str]()
    for number in range(1, victim.version() + 1):
        entry = policies.find(number).batch_entry
        assert entry is not None
        batch = TrajectoryBatch.from_bytes(batches.read(batches.read_commit(entry).file))
        for group in batch.groups():
            found |= {f"{group.key.prompt}.{group.key.attempt}.{one.sample}" for one in group.trajectories}
    return found


def measure(folder: Path, kills: int, seconds: float, durable: str, *, saves: bool) -> list[Row]:
    """Execute one run with kills, and return its rows."""
    case = f"{durable}, {'snapshots' if saves else 'replays'}"
    folder.mkdir(parents=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    section = TURNS.format(folder=folder, saves=str(saves).lower(), durable=durable)
    recipe = RECIPE.format(seed=random.randrange(10**6), versions=VERSIONS, engine="timed", timing=TIMING["timed"])
    recipe = recipe.replace("max_new_tokens = 16", "max_new_tokens = 64")
    witness, victim = Witness(folder), Victim(folder / "home", recipe + section)
    try:
        waits = kill_run(victim, witness, kills, seconds)
        witness.note_kill()
        end_run(victim)
        outcome = victim.finish([], END_SECONDS)
        for violation in outcome.violations:
            print(f"violation: {violation}")
        return build_rows(case, waits, witness, list_trained(victim), len(outcome.violations), is_right=outcome.right)
    finally:
        kill_everything(victim.home)


def build_rows(
    case: str, waits: Sequence[float], witness: Witness, trained: set[str], violations: int, *, is_right: bool
) -> list[Row]:
    """Return the rows of one run."""
    lost, (sampled, newest) = witness.count_lost(), witness.count_tokens()
    named = {name: tokens for name, tokens in newest.items() if name.rpartition(".")[0] in trained}
    doubled = sum(count - 1 for count in Counter(witness.read("actions")).values())
    return [
        Row(case, "kills of everything", len(waits)),
        at_least(case, "run ended, audit clean (1: yes)", float(is_right), 1.0),
        at_most(case, "violations of the audit", violations, 0),
        at_most(case, "actions done twice", doubled, 0),
        at_most(case, "lost turns of one episode in one kill", max(max(one.values(), default=0) for one in lost), 1),
        Row(case, "lost turns, all kills", sum(sum(one.values()) for one in lost)),
        Row(case, "turns that finished", len(newest)),
        Row(case, "sampled tokens accounted for", sum(newest.values()) / max(sampled, 1)),
        Row(case, "sampled tokens trained on", sum(named.values()) / max(sampled, 1)),
        Row(case, "next version, median s", statistics.median(waits) if waits else 0.0),
        at_most(case, "next version, worst s", max(waits, default=0.0), AIM_SECONDS),
    ]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50, help="kills of all processes")
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes after which no further kill begins")
    parser.add_argument("--durable", default="before-action", choices=["before-action", "background"])
    parser.add_argument("--replays", action="store_true", help="the environment stores no snapshots")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turns-") as place:
        folder = Path(place) / "run"
        rows = measure(folder, options.kills, 60 * options.minutes, options.durable, saves=not options.replays)
    publish(rows, "kills of everything in episodes of several turns", options.json)


if __name__ == "__main__":
    main()
