"""Measures the memory of publish and restore, and how long publishing delays a learner, on 1 to 4 ranks.

Memory is the peak of a process during publishing or restoring, above the memory of the process after its imports. A row
divides this peak by the bytes of weights and state. Unsharded ranks hold all of these bytes; sharded ranks (`sharded`,
`deepspeed`) hold less.

Publishing is measured after a step, so that memory that the step has not freed is included. The delay consists of the
checks before publishing, and of the time that the next step waits until the version is stored. A row divides this delay
by the time of a step without publishing. Larger batches make steps longer, and these fractions smaller.

Each side is a process (see `publishing_sides`), and the store is a folder that is removed afterwards. Linux only. Run
it as `python -m benchmarks.publishing`; 1B parameters in bfloat16 without masters take 10 GB of memory and 13 GB of
disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from benchmarks.publishing_sides import Setting
from benchmarks.report import Row, arguments, at_most, publish

MOST_MEMORY, MOST_STALL = 1.3, 0.15
SHAPES: Mapping[str, Mapping[str, int]] = {  # every attention head has 64 dimensions
    "tiny": {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2},
    "100M": {"vocab_size": 32_000, "hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 12},
    "1B": {"vocab_size": 100_000, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 15},
}


def described(size: str, folder: Path) -> Path:
    """Write a folder with the policy's config, with tied embeddings as in small policies."""
    heads = SHAPES[size]["hidden_size"] // 64
    Qwen2Config(
        **SHAPES[size],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def side(name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    """Execute one side and return its results."""
    command = [sys.executable, "-m", "benchmarks.publishing_sides", name, str(folder), json.dumps(asdict(setting))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    print(f"{folder.name} {name} {done.stdout}", file=sys.stderr, end="")
    return dict(json.loads(done.stdout))


def rows_of(size: str, setting: Setting, folder: Path) -> Iterator[Row]:
    """Return the rows of one policy with the setting's number of ranks."""
    policy = described(size, folder)
    made, again = side("publish", policy, setting), side("restore", policy, setting)
    ranks = setting.ranks
    share = made["share"] / (ranks if setting.learner == "sharded" else 1)  # number of bytes that one rank should hold
    masters = "" if setting.masters == "float32" else " without masters"
    case = f"{made['parameters'] / 1e6:,.0f}M in {setting.dtype}{masters}, {setting.learner}, ranks {ranks}"
    yield Row(case, "weights and state of a rank, MB", share / 1e6)
    yield Row(case, "imports, MB", made["level"] / 1e6)
    for what, found in (("publish", made), ("restore", again)):
        yield at_most(case, f"{what}, first rank: memory over its share", found["peaks"][0] / share, MOST_MEMORY)
        if ranks > 1:
            yield at_most(case, f"{what}, any other: the same", max(found["peaks"][1:]) / share, MOST_MEMORY)
    yield Row(case, "restore, seconds", again["seconds"])
    yield Row(case, "publish with nothing beside it, seconds", made["line"])
    if not setting.tokens:
        return
    yield Row(case, "a step, seconds", made["step"])
    yield Row(case, "check before it, of a step", made["check"] / made["step"])
    yield Row(case, "wait of the next step, of a step", made["waited"] / made["step"])
    yield at_most(case, "both, of a step", (made["check"] + made["waited"]) / made["step"], MOST_STALL)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", nargs="*", choices=list(SHAPES), default=["100M", "1B"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--masters", choices=["float32", "policy"], default="policy")
    parser.add_argument("--learner", choices=["torch", "sharded", "deepspeed"], default="torch")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each of 16 responses; 0: only memory")
    parser.add_argument("--folder", type=Path, help="folder to write to; default: a temporary folder")
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        for ranks in options.ranks:
            setting = Setting(options.dtype, options.masters, ranks, options.learner, options.tokens)
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                rows += list(rows_of(size, setting, Path(name, f"{size}-{ranks}")))
    publish(rows, "publish and restore: memory over weights and state, and what a step waits", options.json)


if __name__ == "__main__":
    main()
