"""Compares tokens per second of the whole rollout path with vLLM's offline `LLM.generate`, on the same prompts.

    ours: scheduler -> proxy -> Ray -> vLLM -> reward workers -> Arrow -> commit to disk -> Ray channel -> reader
    theirs: LLM.generate(all prompts)

Both sides have the same policy, prompts, sampling, slots, KV cache and threads. On both sides, vLLM does not compute
the rank of the sampled token, which is not needed and costs a third of the sampler's time. All other settings of
`LLM.generate` are vLLM's defaults: its block size differs, and its model is compiled instead of eager. The two sides
run in turns, each in its own processes. The median of the ratios of adjacent turns is reported. Rollflow's count
includes some tokens that were generated before the first batch was read, in slots that became free early. With long
responses, 1 to 2% of the tokens are of this kind.

Run it as `python -m benchmarks.rollout_overhead`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, arguments, at_least, publish

TARGET = 0.9
GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A workload: longest response, groups per batch, and measured batches (besides one warm-up batch)."""

    name: str
    max_new_tokens: int
    groups: int
    batches: int


CASES = (Case("answers of 6 tokens", 6, 64, 12), Case("responses of 64 tokens", 64, 32, 6))


def recipe(case: Case, threads: int):  # type: ignore[no-untyped-def]
    """Return the recipe: the quick start's policy with random weights, so that responses use their full length."""
    from rollflow.flows.config import parse_config

    return parse_config(
        {
            "cluster": {"lease_seconds": 0},  # no lease, because no supervisor watches this cluster
            "name": "overhead",
            "versions": case.batches + 1,
            "async_ratio": case.batches + 1,
            "groups": case.groups,
            "group_size": GROUP_SIZE,
            "engine": {"kind": "vllm", "max_new_tokens": case.max_new_tokens, "threads": threads},
            "evaluation": {"prompts": 1, "every": 0},
            "policy": {"cold_start": {}},
        }
    )


def prepared(case: Case, threads: int, home: Path, address: str = ""):  # type: ignore[no-untyped-def]
    """Prepare a run with published version 0, on the cluster at `address`."""
    from rollflow.flows.prepare import prepare
    from rollflow.storage.log.entries import VersionPublished
    from rollflow.tasks.learners.config import TorchTrain
    from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
    from rollflow.tasks.run.context import claim

    os.environ["ROLLFLOW_HOME"] = str(home)
    context = prepare(recipe(case, threads), f"overhead-{case.max_new_tokens}-{time.time_ns()}")
    model = load_model(context.policy_folder, "float32", trained=False)
    learner = TorchLearner(model, TorchTrain(), temperature=1.0, versions=1, longest=1, seed=0)
    claim(context, "supervisor", address)
    writer, store = claim(context, "learner", address), context.policies
    weights, state = (store.stage(writer, 0, files) for files in (learner.weights(), learner.state()))
    probe = learner.logprobs(context.probe_tokens)
    store.publish(writer, VersionPublished(0, None, weights, state, probe))
    return context


def ours(case: Case, threads: int, home: Path) -> float:
    """Measure tokens per second through the whole path, from the time when the first batch is read to the last one."""
    import pyarrow.compute as pc

    from rollflow.flows.ray_cluster.ray_head import RayHead

    head = RayHead(home)
    os.environ.update(head.env)  # Ray reads the cluster's token mode when it is imported
    from rollflow.flows.ray_cluster import cluster
    from rollflow.storage.batch import TrajectoryBatch
    from rollflow.tasks.actors.channel import start_channel
    from rollflow.tasks.actors.reward import start_reward
    from rollflow.tasks.actors.rollout import start_rollout
    from rollflow.tasks.actors.run_engines import start_engine

    context = prepared(case, threads, home, head.address)
    with head, cluster.attached_cluster(head.address, context.run_id):
        channel = start_channel(context.store, case.batches + 2, 0)
        pool = start_reward(context)
        pool.run.remote()
        cluster.call_within(start_engine(context, 0, 0).start.remote(), 300, "the engine")
        actor = start_rollout(context, head.address)
        actor.run.remote()
        cluster.call_within(actor.join.remote(0), 300, "the scheduler to take the engine")
        tokens, began = 0, 0.0
        for number in range(case.batches + 1):
            batch = TrajectoryBatch.from_bytes(channel.lease(number, 300))
            if number:
                tokens += pc.sum(pc.list_flatten(batch.table["loss_mask"])).as_py()
            else:
                began = time.monotonic()
        return float(tokens / (time.monotonic() - began))


def theirs(case: Case, threads: int, home: Path) -> float:
    """Measure tokens per second of one `LLM.generate` over the same number of the same prompts."""
    context = prepared(case, threads, home)
    weights = context.weights(0)
    (context.policy_folder / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes())
    llm = offline_llm(str(context.policy_folder), context.config.engine.max_concurrent_requests, threads)
    prompts = context.prompts()
    asked = [prompts.prompt(i).tokens for i in range(case.groups * case.batches) for _ in range(GROUP_SIZE)]
    prompts = [{"prompt_token_ids": list(tokens)} for tokens in asked]
    parameters = sampling(case.max_new_tokens, context.tokenizer.stop_tokens)
    llm.generate(prompts[: case.groups * GROUP_SIZE], parameters, use_tqdm=False)
    began = time.monotonic()
    made = llm.generate(prompts, parameters, use_tqdm=False)
    return sum(len(m.outputs[0].token_ids) for m in made) / (time.monotonic() - began)


def offline_llm(folder: str, slots: int, threads: int):  # type: ignore[no-untyped-def]
    """Open vLLM as a user would for offline batches, with vLLM's defaults except for the engine's fixed settings.

    The rank of the sampled token is left out."""
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm import LLM

    from rollflow.tasks.engines.vllm.arguments import WORKER

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=slots,
        kv_cache_memory_bytes=256 << 20,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        worker_extension_cls=f"{WORKER}.PolicyWorker",
    )
    llm.collective_rpc("prepare_policy_worker")
    return llm


def sampling(max_new_tokens: int, stop_tokens: tuple[int, ...]):  # type: ignore[no-untyped-def]
    """Return the engine's sampling parameters: temperature 1, the sampled token's log-prob, no text."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_new_tokens, logprobs=0, stop_token_ids=list(stop_tokens), detokenize=False)


def turn(side: str, case: Case, threads: int, home: Path) -> float:
    """Make one measurement in its own process."""
    arguments = [
        sys.executable,
        "-m",
        "benchmarks.rollout_overhead",
        "--turn",
        side,
        case.name,
        str(threads),
        str(home),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{side}, {case.name}: {done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of vLLM, on both sides")
    parser.add_argument("--turn", nargs=4, help=argparse_suppress())
    options = parser.parse_args()
    if options.turn:
        side, name, threads, home = options.turn
        case = next(c for c in CASES if c.name == name)
        print(json.dumps({"ours": ours, "theirs": theirs}[side](case, int(threads), Path(home))), flush=True)
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as home:
        for case in CASES:
            found = [
                tuple(turn(side, case, options.threads, Path(home)) for side in ("ours", "theirs"))
                for _ in range(options.turns)
            ]
            rows.append(Row(case.name, "rollflow, tokens/s", statistics.median(a for a, _ in found)))
            rows.append(Row(case.name, "LLM.generate, tokens/s", statistics.median(b for _, b in found)))
            ratio = statistics.median(a / b for a, b in found)
            rows.append(at_least(case.name, "ratio (median of turns)", ratio, TARGET))
    publish(rows, f"rollout path against vLLM offline, {options.threads} thread(s)", options.json)


def argparse_suppress() -> str:
    import argparse

    return argparse.SUPPRESS


if __name__ == "__main__":
    main()
