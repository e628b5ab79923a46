"""Measures speculative decoding for prompts that a run asks again, both by replay of stored responses and on vLLM.

    python -m benchmarks.speculation [--home FOLDER] [--run STORE] [--only replay engine] [--json FILE]

The program trains the start policy of the quick start for some versions on a file of questions, which are asked again
in each epoch. An existing run in `--home` is reused; `--run` reads any other run, such as `.../store/runs/NAME`.

- replay: each stored response is read token by token, with drafts from the responses of earlier batches (suffix) or
  from the response itself (ngram). A draft is accepted up to the first token that differs from the stored response.
  This is what an engine would have accepted, because a seeded engine draws the same tokens with and without drafts.
- engine: vLLM answers the prompts of the newest batch under the newest weights, without drafts and with each kind of
  drafts, in turns. Past responses are those of all batches but the newest. Every side gets the same requests and seeds.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.quick_start import run
from benchmarks.report import Row, arguments, at_least, publish
from benchmarks.stale import policy_of
from rollflow.flows.config import load_recipe
from rollflow.flows.locations import attach_run
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.model_input import ModelInput
from rollflow.storage.recent_responses import TOKEN, list_responses
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import DraftCounts, Generation, GenerationRequest
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.past_responses import PastResponses
from rollflow.tasks.engines.speculation import LONGEST_NGRAM, SHORTEST_NGRAM, PastResponse
from rollflow.tasks.engines.vllm.engine import VllmEngine
from rollflow.tasks.run.context import RunContext

RECIPE = """
name = "asked-again"
seed = 0
versions = 30
groups = 64
group_size = 8

[policy]
path = "{policy}"

[[prompts]]
kind = "jsonl"
path = "questions.jsonl"

[reward]
kind = "exact"

[evaluation]
prompts = 20

[engine]
max_new_tokens = 6
speculation = "suffix"

[train]
learning_rate = 4e-4
minibatches = 2

[train.objective]
kind = "grpo"
"""
QUESTIONS, DIGITS = 256, 5
LIMITS = (1, 2, 4, 8)  # largest numbers of drafted tokens
AGES = (2, 4, 8, 32)  # upper ends of the ranges of a past response's age, in versions
AT_ONCE = (1, 8, 64, 512)  # numbers of requests that run on vLLM at the same time
LENGTH_AIM, SPEED_AIM = 2.1, 1.5
SIDES = ("none", "ngram", "suffix")
Drafter = Callable[[int], Sequence[int]]  # number of read tokens -> drafted tokens


@dataclass
class Tally:
    """Counts of a replay: decoding steps after the first token of each response, and drafted and accepted tokens."""

    steps: int = 0
    tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def count(self, drafted: int, accepted: int) -> None:
        """Count one step, which samples the accepted tokens and one more."""
        self.steps += 1
        self.tokens += accepted + 1
        if drafted:
            self.drafts += DraftCounts(1, drafted, accepted)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--home", type=Path, default=Path(".rollflow/speculation"), help="folder of the run")
    parser.add_argument("--policy", type=Path, help="a policy folder in place of the start policy of the quick start")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="config changes: KEY=VALUE")
    parser.add_argument("--run", help="address of a finished run, in place of a run in --home")
    parser.add_argument("--only", nargs="*", choices=["replay", "engine"], default=["replay", "engine"])
    parser.add_argument("--turns", type=int, default=5, help="number of measurements of each side on vLLM")
    parser.add_argument("--seeded", action="store_true", help="let every request draw from its own seed")
    options = parser.parse_args()
    context = attach_run(options.run or make_run(options.home.absolute(), options.policy, options.set))
    batches = list(read_batches(context))
    found: list[Row] = []
    if "replay" in options.only:
        found += [row for kind in ("suffix", "ngram") for row in replay(batches, kind)]
    if "engine" in options.only:
        found += asyncio.run(measure_engines(context, batches, options.turns, seeded=options.seeded))
    publish(found, "Speculative decoding on prompts asked again", options.json)


def make_run(home: Path, policy: Path | None, changes: Sequence[str]) -> str:
    """Return the address of the run in `home`; execute a missing run."""
    home.mkdir(parents=True, exist_ok=True)
    folder = policy or policy_of(load_recipe(Path("flows/recipes/sorting.toml"), []), home)
    draw = random.Random(0)
    asked = {"".join(draw.choices("0123456789", k=DIGITS)) for _ in range(QUESTIONS)}
    rows = [{"question": f"Sort {one}.", "answer": "".join(sorted(one))} for one in sorted(asked)]
    (home / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "recipe.toml").write_text(RECIPE.format(policy=folder.absolute()))
    storage: str = run(home, home / "recipe.toml", changes)["storage"]
    return storage


def read_batches(context: RunContext) -> Iterator[tuple[int, list[PastResponse]]]:
    """Yield the number and the responses of each committed batch, in order."""
    context.log.follow()
    for written in iterate_written(context.log, 0, context.log.state.n):
        if isinstance(body := written.entry.body, BatchCommitted):
            yield body.number, list(list_responses(TrajectoryBatch.from_bytes(context.batches.read(body.file))))


def replay(batches: Sequence[tuple[int, list[PastResponse]]], kind: str) -> Iterator[Row]:
    """Replay all responses to prompts that were asked before, for each limit on the drafted tokens."""
    for most in LIMITS:
        tallies: dict[str, Tally] = defaultdict(Tally)
        past, newest = PastResponses(), dict[bytes, int]()
        for number, rows in batches:
            for prompt, response in rows:
                if prompt in newest:
                    age = next((end for end in AGES if number - newest[prompt] <= end), None)
                    name = f"age up to {age} versions" if age else "older"
                    read_response(prompt, response, kind, past, most, (tallies["all"], tallies[name]))
            for prompt, response in rows:
                past.add(prompt, response)
                newest[prompt] = number
        ages = sorted(set(tallies) - {"all"}) if most == max(LIMITS) else []
        for name in ("all", *ages):
            yield from describe(tallies[name], kind, f"at most {most} drafted" if name == "all" else name)


def describe(tally: Tally, kind: str, case: str) -> Iterator[Row]:
    drafts, name = tally.drafts, f"replay, {kind}, {case}"
    if kind == "suffix" and case == f"at most {max(LIMITS)} drafted":
        yield at_least(name, "tokens of a step with a draft", drafts.length, LENGTH_AIM)
    else:
        yield Row(name, "tokens of a step with a draft", drafts.length)
    yield Row(name, "tokens of a step after the first", tally.tokens / max(tally.steps, 1))
    yield Row(name, "accepted of drafted (%)", 100 * drafts.accepted / max(drafts.drafted, 1))


def read_response(
    prompt: bytes, response: bytes, kind: str, past: PastResponses, most: int, tallies: Sequence[Tally]
) -> None:
    """Read a stored response; its first token is sampled together with the prompt, without a draft."""
    tokens = np.frombuffer(response, TOKEN).tolist()
    draft = follow_past(past, prompt, tokens, most) if kind == "suffix" else follow_ngrams(prompt, tokens, most)
    place = 1
    while place < len(tokens):
        drafted = list(draft(place))
        accepted = 0
        while accepted < min(len(drafted), len(tokens) - place) and drafted[accepted] == tokens[place + accepted]:
            accepted += 1
        sampled = min(accepted, len(tokens) - place - 1)  # a step cannot sample more tokens than the response has left
        for tally in tallies:
            tally.count(len(drafted), sampled)
        place += sampled + 1


def follow_past(past: PastResponses, prompt: bytes, tokens: Sequence[int], most: int) -> Drafter:
    cursor = past.follow(prompt)
    assert cursor is not None, "the prompt was asked before"

    def draft(place: int) -> Sequence[int]:
        cursor.read(tokens[cursor.length : place])
        return cursor.draft(most)

    return draft


def follow_ngrams(prompt: bytes, tokens: Sequence[int], most: int) -> Drafter:
    """Return a function that drafts tokens as vLLM's n-gram proposer does."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as propose

    row = np.concatenate([np.frombuffer(prompt, TOKEN), np.array(tokens, TOKEN)])
    begin = len(row) - len(tokens)

    def draft(place: int) -> Sequence[int]:
        found: list[int] = propose(row[: begin + place], SHORTEST_NGRAM, LONGEST_NGRAM, 1 << 30, most).tolist()
        return found

    return draft


async def measure_engines(
    context: RunContext, batches: Sequence[tuple[int, list[PastResponse]]], turns: int, *, seeded: bool
) -> list[Row]:
    """Measure each side with several numbers of requests at once."""
    newest = context.policies.newest()
    seen = {prompt for _, rows in batches[:-1] for prompt, _ in rows}
    asked = [prompt for prompt, _ in batches[-1][1] if prompt in seen]
    engines = {kind: await start(context, kind, newest, seeded=seeded) for kind in SIDES}
    await engines["suffix"].remember([row for _, rows in batches[:-1] for row in rows])
    found: list[Row] = []
    for count in AT_ONCE:
        found += await measure_load(engines, asked[:: max(1, len(asked) // count)][:count], context, turns)
    for engine in engines.values():
        await engine.close()
    return found


async def measure_load(
    engines: dict[str, VllmEngine], asked: Sequence[bytes], context: RunContext, turns: int
) -> list[Row]:
    """Measure the tokens per second of each side, in turns, with several requests at once."""
    speeds: dict[str, list[float]] = {kind: [] for kind in SIDES}
    drafts: dict[str, DraftCounts] = {kind: DraftCounts() for kind in SIDES}
    for turn in range(turns + 1):
        for kind, engine in engines.items():
            began = time.perf_counter()
            made = await answer(engine, asked, context.config.engine.max_new_tokens, turn)
            if turn:  # the first turn warms up
                speeds[kind].append(sum(len(one.tokens) for one in made) / (time.perf_counter() - began))
                drafts[kind] += sum((one.drafts for one in made), DraftCounts())
    return [row for kind in SIDES for row in compare(kind, speeds, drafts[kind], len(asked))]


def compare(kind: str, speeds: dict[str, list[float]], drafts: DraftCounts, asked: int) -> Iterator[Row]:
    case = f"vLLM, {kind}, {asked} requests at once"
    yield Row(case, "tokens/s (median)", statistics.median(speeds[kind]))
    if kind != "none":
        ratio = statistics.median(a / b for a, b in zip(speeds[kind], speeds["none"], strict=True))
        aims = at_least if kind == "suffix" else None
        metric = "times the tokens/s without drafts"
        yield aims(case, metric, ratio, SPEED_AIM) if aims else Row(case, metric, ratio)
        yield Row(case, "tokens of a step with a draft", drafts.length)
        yield Row(case, "accepted of drafted (%)", 100 * drafts.accepted / max(drafts.drafted, 1))


async def start(context: RunContext, kind: str, version: int, *, seeded: bool) -> VllmEngine:
    """Start an engine with the weights of a version."""
    config = context.config.engine
    assert isinstance(config, VllmEngineConfig), "the run must use vLLM"
    config = VllmEngineConfig.model_validate({**config.model_dump(), "speculation": kind})
    engine = VllmEngine(config, context.policy_folder, dtype=context.config.policy.dtype, seeded=seeded)
    await engine.start()
    await engine.suspend("continue")
    await engine.update(version, context.weights(version))
    await engine.resume()
    return engine


async def answer(engine: VllmEngine, asked: Sequence[bytes], most: int, turn: int) -> list[Generation]:
    """Ask all prompts at once."""
    return await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(f"{turn}-{number}", ModelInput(Int32s(prompt)), most, seed=turn << 20 | number)
            )
            for number, prompt in enumerate(asked)
        )
    )


if __name__ == "__main__":
    main()
