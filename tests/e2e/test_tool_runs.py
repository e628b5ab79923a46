"""Tests whole runs whose policy calls tools: Python in sandboxes, and an MCP server that runs beside a Ray actor."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rollflow.storage.audit.audit import audit
from rollflow.storage.objects import open_store
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of
from rollflow.tasks.sandboxes import build_sandboxes
from tests.e2e.test_runs import Command, leftovers
from tests.environments.tool_episodes import SANDBOX, run_code
from tests.environments.worlds import call
from tests.support.sandbox_kinds import start_and_close
from tests.support.waiting import until
from tests.tasks.test_scheduler import trained

pytestmark = pytest.mark.slow

PRODUCTS = Path("flows/recipes/python_tool.toml")
SERVER = Path(__file__).parents[1] / "environments" / "servers" / "bare_server.py"
CALLS = [*(run_code(f"{number} * 7") for number in range(40)), *(call("echo", text=f"said {n}") for n in range(40))]
RECIPE = """
name = "tools"
versions = 2
groups = 4
group_size = 4

[policy]
path = "{policy}"

[engine]
kind = "transformers"
max_new_tokens = 3500

[environment]
kind = "tools"
max_turns = 3
max_turn_tokens = 8

[environment.python.sandbox]
spares = 0

[environment.mcp.bare]
command = ["{python}", "-m", "server_of_a_whole_run"]
env = {{ PYTHONPATH = "{folder}" }}

[train.objective.advantage]
scale = "none"

[evaluation]
every = 0
prompts = 2
"""


def make_calling_policy(folder: Path) -> None:
    """Create a policy with random weights and extra tokens that are whole tool calls (a quarter of all tokens)."""
    folder.mkdir(parents=True)
    small = ColdStart(hidden_size=32, layers=2, heads=2, context=4096)
    for name, data in build_cold_folder(small, ["Sort 3 1 2.", "1 2 3"] * 10).items():
        (folder / name).write_bytes(data)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(CALLS)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.soak
async def test_policy_of_a_whole_run_uses_its_tools(tmp_path: Path) -> None:
    async with start_and_close(build_sandboxes(SANDBOX)):
        pass  # a machine without sandboxes cannot run the recipe
    policy = tmp_path / "policy"
    make_calling_policy(policy)
    shutil.copy(SERVER, tmp_path / "server_of_a_whole_run.py")
    command = Command(tmp_path / "home", RECIPE.format(policy=policy, python=sys.executable, folder=tmp_path))
    command.run("run", str(command.recipe), "--run-id", "one")
    store = open_store(f"{command.home}/store/runs/one")
    context = RunContext(f"{command.home}/store/runs/one", tmp_path / "cache")
    report = audit(store, expected=expected_of(context))
    assert report.clean, report.violations
    tokenizer = PolicyTokenizer(policy)
    rows = [one for _, batch in trained(store) for group in batch.groups() for one in group.trajectories]
    texts = [tokenizer.decode(one.tokens) for one in rows]
    assert len(rows) == 2 * 4 * 4
    results = [number * 7 for number in range(1, 40)]
    assert any(f"<tool_response>{result}\n" in text for text in texts for result in results)
    assert any("<tool_response>said " in text for text in texts)
    assert all(one.turn_starts for one in rows)
    until(lambda: not leftovers(command.home))
    lines = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if "server_of_a_whole_run" in line]


@pytest.mark.xdist_group("vllm")
async def test_python_tool_recipe_trains_on_calls(tmp_path: Path) -> None:
    """The recipe `python_tool.toml` is run with small settings."""
    async with start_and_close(build_sandboxes(SANDBOX)):
        pass
    command = Command(tmp_path / "home", PRODUCTS.read_text())
    changes = "versions=2", "groups=4", "group_size=4", "train.minibatches=1", "evaluation.prompts=20"
    small = *changes, "prompts.0.options.digits=2", "policy.cold_start.target_accuracy=0.2"
    command.run("run", str(command.recipe), "--run-id", "one", *(word for one in small for word in ("--set", one)))
    store = open_store(f"{command.home}/store/runs/one")
    assert audit(store).clean
    rows = [one for _, batch in trained(store) for group in batch.groups() for one in group.trajectories]
    assert len(rows) == 2 * 4 * 4
    assert any(len(one.turn_starts or ()) > 1 for one in rows)
    until(lambda: not leftovers(command.home))
