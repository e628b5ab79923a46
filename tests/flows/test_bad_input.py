"""Tests that bad input gives exit code 2 and one sentence with the key, the value and the fix, without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows import prepare
from rollflow.flows.commands.cli import main
from rollflow.flows.config import parse_config
from rollflow.flows.locations import attach_run
from rollflow.flows.services.process import free_port
from rollflow.flows.services.reachability import check_store_reach
from rollflow.storage.errors import ConfigError
from rollflow.storage.objects import open_store
from rollflow.tasks.policies.config import ColdStart, PolicyConfig
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.refused import refused, refused_alike
from tests.support.waiting import HANG_SECONDS

RECIPE = "flows/recipes/sorting.toml"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("async_ration=2", ["async_ration = 2", "no such key", "async_ratio"]),
        ("train.learning_rte=1", ["train.learning_rte = 1", "did you mean train.learning_rate?"]),
        ("engine.max_requests=3", ["engine.max_requests = 3", "engine.max_concurrent_requests"]),
        ("versions=many", ["versions = 'many'", "integer"]),
        ("versions=true", ["versions = true", "write a number"]),
        ('rollout.admit_by="kv"', ["rollout.admit_by = 'kv'", "engine.kv_tokens"]),
        ("engine={kind='transformers', speculation='suffix'}", ["engine.speculation = 'suffix'", "no such key"]),
        ('engine.speculation="mtp"', ["engine.speculation = 'mtp'", 'choose "suffix" or "ngram"']),
        ("engine.max_model_len=6", ["engine.max_model_len = 6", "engine.max_new_tokens = 6", "choose 7 or more"]),
        ("engine.max_model_len=4096", ["engine.max_model_len = 4096", "context has only 256 tokens", "remove the key"]),
        ("engine.gpu_memory_utilization=1.5", ["engine.gpu_memory_utilization = 1.5", "greater than the maximum of 1"]),
        ("engine.gpu_memory_utilization=0.5", ["engine.gpu_memory_utilization = 0.5", "set engine.kv_cache_bytes"]),
        (
            "engine={gpu_memory_utilization=0.5, kv_cache_bytes=4}",
            ["engine.gpu_memory_utilization = 0.5", "engine.kv_cache_bytes = 4", "remove one of the two keys"],
        ),
        ("engine.quantization=fp8", ["engine.quantization = 'fp8'", "fp8_per_channel"]),
        (
            "engine.quantization=fp8_per_channel",
            ["engine.quantization = 'fp8_per_channel'", 'policy.dtype = "bfloat16"'],
        ),
        ("engine.vllm=1", ["engine.vllm = 1", "dictionary"]),
        ("engine.vllm.dtype=half", ["engine.vllm.dtype = 'half'", "set policy.dtype instead"]),
        ("engine.vllm.seed=1", ["engine.vllm.seed = 1", "the key seed", "remove the argument"]),
        ("engine.vllm.max_batched_tokens=64", ["engine.vllm.max_batched_tokens = 64", "mean max_num_batched_tokens?"]),
        ("rollout.redundant_groups=false", ["rollout.redundant_groups = false", "write a number"]),
        ("rollout.filter.min_mean=true", ["rollout.filter.min_mean = true", "write a number"]),
        ("train.betas=[true, 0.9]", ["train.betas = [true, 0.9]", "write a number"]),
        ("async_ratio=-1", ["async_ratio = -1", "less than the minimum of 0"]),
        (
            "reward={kind='exact', judge_tries=0, unjudged='leave_out'}",
            ["reward.unjudged = 'leave_out'", "set judge_tries to 1 or more"],
        ),
        ("group_size=1", ["group_size = 1", 'baseline and scale of train.objective.advantage to "none"']),
        ("train.minibatches=3", ["train.minibatches = 3", "groups = 256"]),
        ("engine.kind=sglang", ["engine", "'sglang'", "'vllm', 'transformers', 'timed'"]),
        ("prompts.0.chat=true", ["prompts.chat = True", "no chat template", "policy.cold_start.chat_template"]),
        ("environment.kind=tools", ["environment.kind = 'tools'", "the policy has no tool", "[environment.python]"]),
        ("prompts=[{kind='seeds'}]", ["prompts.0.kind = 'seeds'", "choose an environment that makes its task"]),
        ("prompts=[{kind='seeds', question='Go.'}]", ["prompts.question = 'Go.'", "write {seed} into the question"]),
        (
            "environment={kind='mixed', default='a', kinds={b={kind='trl', path='a:B'}}}",
            ["environment.default = 'a'", "name one of: b"],
        ),
        (
            "environment={kind='tools', mcp={shop={command=['a'], env={SHOP_TOKEN='x'}}}}",
            ["environment.mcp.shop.env.SHOP_TOKEN = '...'", "environment.mcp.shop.pass_env"],
        ),
        ("policy.path=x", ["policy.path = '/", "/x': ", "give exactly one of"]),
        ("train.lora.rank=0", ["train.lora.rank = 0", "less than or equal to the minimum of 0"]),
        ("train={objective = {kind = 'ppo'}, lora = {}}", ["train.critic.model = 'own'", 'choose "head"']),
        ("train={kind = 'deepspeed', lora = {}}", ["train.kind = 'deepspeed'", "remove [train.lora]"]),
        ("train={kind = 'deepspeed', ranks = 1}", ["train.ranks = 1", "less than or equal to the minimum of 1"]),
        ("train={kind = 'deepspeed', options = {bf16 = {}}}", ["train.options.bf16 = {}", "set policy.dtype"]),
        ("prompts.7.family=x", ["prompts.7.family", "not a position"]),
        ("tracking.uri=https://me:hidden@hub/x", ["tracking.uri = 'https://...@hub'", "MLFLOW_TRACKING_PASSWORD"]),
        ("nonsense", ["'nonsense'", "key=value"]),
        ("async_ratio=1e308", ["async_ratio = 1e+308", "greater than the maximum of 1000000000"]),
        (
            "recovery.answer_seconds=1e308",
            ["recovery.answer_seconds = 1e+308", "greater than the maximum of 1000000000"],
        ),
        (
            "rollout.patience_seconds=1e17",
            ["rollout.patience_seconds = 1e+17", "greater than the maximum of 1000000000"],
        ),
        ("async_ratio=inf", ["async_ratio = inf", "choose a finite one"]),
        ("rollout.filter.min_mean=nan", ["rollout.filter.min_mean = nan", "choose a finite one"]),
        ("train.betas=[0.9, inf]", ["train.betas.1 = inf", "choose a finite one"]),
        ("prompts.0.options.when=2020-01-01", ["prompts.0.options.when = '2020-01-01'", "put it in quotes"]),
        ("prompts.0.options.size=inf", ["prompts.0.options.size = inf", "choose a finite one"]),
        (f"seed={2**63}", [f"seed = {2**63}", "64 bits"]),
        (f"seed={'9' * 5000}", ["seed = '9", "as an integer"]),
        (f"name={'[' * 3000}", ["name = '[", "should match pattern"]),
        ("reward.format.pattern=(", ["reward.format.pattern = '('", "not a valid regular expression", "correct it"]),
        ("reward.format.penalty=0", ["reward.format.penalty = 0", "less than or equal to the minimum of 0"]),
        ("versions=1\nseed = 2", ["versions = '1", "integer"]),
        ("prompts.².family=x", ["prompts.²", "the list has 1 items, and"]),
    ],
)
def test_bad_config_gets_a_one_sentence_error(
    capsys: pytest.CaptureFixture[str], override: str, words: list[str]
) -> None:
    sentence = refused(capsys, "check", RECIPE, "--set", override)
    assert all(word in sentence for word in words), sentence
    assert "hidden" not in sentence


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("tran={learning_rate=1}", "train?"),
        ("tran=1", None),  # the similar key is a section, but the user gave a value
        ("policy.coldstart={}", "policy.cold_start?"),
        ("policy.coldstart=1", None),
        ("train.learnin_rate={a=1}", None),  # the similar key takes a value, but the user gave a section
        ('prompt=[{kind="jsonl"}]', "prompts?"),
        ("prompt={}", None),  # the similar key takes a list of sections, but the user gave one section
        ('prompts=[{kind="reasoning-gym",familly="x"}]', "prompts.0.family?"),
        ('prompts=[{kind="jsonl",path="x",familly="y"}]', None),  # prompts from a file have no key `family`
        ('prompts=[{kind="reasoning-gym",option={}}]', "prompts.0.options?"),
        ("prompts.0.digit=3", "prompts.0.digits?"),
        ("engine.max_requests=3", "engine.max_concurrent_requests?"),
        ('engine={kind="timed",max_requests=3}', "engine.max_concurrent_requests?"),
        ("engine.batch_slowdow=3", None),  # only the timed engine has `batch_slowdown`
        ('engine={kind="timed",batch_slowdow=3}', "engine.batch_slowdown?"),
        ("learning_rate=3", "train.learning_rate?"),
        ("engine.jsonl=1", None),
    ],
)
def test_error_suggests_only_keys_that_fit_the_given_value(
    capsys: pytest.CaptureFixture[str], override: str, hint: str | None
) -> None:
    said = refused(capsys, "check", RECIPE, "--set", override)
    assert "there is no such key" in said
    assert said.endswith(f"did you mean {hint}" if hint else "remove the key; `rollflow keys` lists all keys")


def test_unknown_key_with_the_name_of_a_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "check", RECIPE, "--set", "engine.timed=1").startswith("engine.timed = 1: there is no such")


@pytest.mark.parametrize("key", ["engine.temperature", "evaluation.temperature"])
@pytest.mark.parametrize("value", ["0.005", "1e-6", "2.5"])
def test_temperature_that_vllm_does_not_support_is_refused(
    key: str, value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """vLLM would sample at a temperature of 0.01, but the losses would use the recipe's temperature. Recorded runs with
    such a temperature can still be read.
    """
    sentence = refused_alike(capsys, RECIPE, "--set", f"{key}={value}")
    assert sentence.startswith(f"{key} = {float(value)}: vLLM supports temperatures from 0.01 to 2; choose")
    assert main(["check", RECIPE, "--set", f"{key}={value}", "--set", "engine.kind=transformers"]) == 0
    section, _, name = key.partition(".")
    tree = {section: {name: float(value)}}
    assert parse_config(tree).model_dump()[section][name] == float(value)


def test_greedy_evaluation_on_vllm_is_accepted() -> None:
    assert main(["check", RECIPE, "--set", "evaluation.temperature=0"]) == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("prompts.0.min_terms=4", ["prompts.min_terms = 4", "max_terms = 3"]),
        ("prompts.0.min_digits=5", ["prompts.min_digits = 5", "max_digits = 3"]),
        ("prompts.0.max_digits=7", ["prompts.0.max_digits = 7", "greater than the maximum of 6"]),
        ("reward.kind=reasoning-gym", ["reward.kind = 'reasoning-gym'", 'set reward.kind = "exact"']),
        ("reward.answer=all", ["reward.answer = 'all'", 'set reward.answer = "tag"']),
    ],
)
def test_invalid_key_of_the_reasoning_recipe_is_refused(
    capsys: pytest.CaptureFixture[str], override: str, words: list[str]
) -> None:
    sentence = refused(capsys, "check", "flows/recipes/reasoning.toml", "--set", override)
    assert all(word in sentence for word in words), sentence


def test_bfloat16_critic_with_deepspeed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    train = "train={kind = 'deepspeed', objective = {kind = 'ppo'}}"
    sentence = refused(capsys, "check", RECIPE, "--set", "policy.dtype=bfloat16", "--set", train)
    assert sentence.startswith("policy.dtype = 'bfloat16': with a critic")


def test_all_errors_of_a_recipe_are_reported_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (recipe := tmp_path / "recipe.toml").write_text(
        'group_size = "many"\n[train]\nlr = 1e-3\nlora_r = 8\nlora = {rank = 0}\n[engin]\nslots = 3\n'
    )
    assert main(["check", str(recipe)]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "rollflow: 5 keys must change:"
    assert {line.partition(" = ")[0]: line.partition(" mean ")[2] for line in lines} == {
        "  group_size": "",
        "  train.lr": "train.learning_rate?",  # found by the first letters of the key's words
        "  train.lora_r": "train.lora.rank?",  # not the section `train.lora`, because the user gave a number
        "  train.lora.rank": "",
        "  engin": "engine?",
    }


def test_conflicts_between_sections_of_a_recipe_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("group_size=1", "train.minibatches=3", "evaluation.engine=lent")
    given = [word for one in wrong for word in ("--set", one)]
    assert main(["check", RECIPE, *given]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "rollflow: 3 keys must change:"
    assert [line.partition(" = ")[0] for line in lines] == [
        "  group_size",
        "  train.minibatches",
        "  evaluation.engine",
    ]
    assert 'the baseline "group" needs group_size = 2 or more' in lines[0]


def test_missing_or_invalid_recipe_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "'nowhere.toml' cannot be read" in refused(capsys, "check", "nowhere.toml")
    for content in (b"versions = = 3", b"versions = " + b"9" * 5000, b"name = " + b"[" * 3000, b"name = '\xff'"):
        (tmp_path / "bad.toml").write_bytes(content)
        assert "is not valid TOML" in refused(capsys, "check", str(tmp_path / "bad.toml"))


def test_recipe_with_bom_and_crlf_is_read(tmp_path: Path) -> None:
    """The recipe's file has a UTF-8 byte-order mark, and line ends of two bytes."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(b"\xef\xbb\xbf" + Path(RECIPE).read_bytes().replace(b"\n", b"\r\n"))
    assert main(["check", str(recipe)]) == 0


def policy_recipe(tmp_path: Path, folder: Path, extra: str = "") -> str:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'{extra}\n[policy]\npath = "{folder}"\n')
    return str(recipe)


def test_missing_model_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = refused_alike(capsys, policy_recipe(tmp_path, tmp_path / "no-model"))
    assert "policy.path" in sentence
    assert "there is no such folder" in sentence


def make_policy(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    for name, data in build_cold_folder(ColdStart(), ["Calculate 1 + 1.", "2"] * 5).items():
        (folder / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tokenizer_without_end_of_sequence_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    described = json.loads((folder / "tokenizer_config.json").read_text())
    del described["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    sentence = refused_alike(capsys, policy_recipe(tmp_path, folder))
    assert "policy.path" in sentence
    assert "no end-of-sequence token" in sentence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "gpt_neox"}, "a model of type gpt_neox (its config.json does not name num_key_value_heads)"),
        ({"model_type": "opt"}, "a model of type opt (its config.json does not name num_key_value_heads)"),
        ({"model_type": "gpt2"}, "a model of type gpt2 (its config.json does not name num_key_value_heads)"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "a model of type qwen2 (one of its layers does not attend",
        ),
    ],
    ids=["gpt_neox", "opt", "gpt2", "windows"],
)
def test_policy_that_the_engine_cannot_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    folder = make_policy(tmp_path / "policy", **changes)
    config = json.loads((folder / "config.json").read_text())
    kept = config if changes["model_type"] == "qwen2" else {k: v for k, v in config.items() if "key_value" not in k}
    (folder / "config.json").write_text(json.dumps(kept))
    recipe = policy_recipe(tmp_path, folder, '[engine]\nkind = "transformers"\n')
    sentence = refused_alike(capsys, recipe)
    assert f"the transformers engine cannot run {why}" in sentence
    assert 'set engine.kind = "vllm"' in sentence


def test_attention_head_size_without_vllm_kernel_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a GPU, engines with such a policy would die one after another."""
    folder = make_policy(tmp_path / "policy", hidden_size=48, num_attention_heads=2)
    sentence = refused_alike(capsys, policy_recipe(tmp_path, folder))
    assert sentence.startswith(
        f"policy.path = '{folder}': vLLM's CPU attention has no kernel for attention heads of size 24"
    )
    cold = ("--set", "policy.cold_start.hidden_size=48", "--set", "policy.cold_start.heads=2")
    assert refused_alike(capsys, RECIPE, *cold).startswith("policy.cold_start.heads = 2: vLLM's CPU attention")


def test_kv_cache_too_small_for_one_request_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The policy has 4 layers of 4 heads of 32, so keys and values in float32 take 4,096 bytes a token. vLLM keeps one
    block for itself.
    """
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}
    folder = make_policy(tmp_path / "policy", max_position_embeddings=131072, **shape)
    need = (131072 + 32) * 4096
    recipe = policy_recipe(tmp_path, folder, f"[engine]\nkv_cache_bytes = {need - 1}\n")
    sentence = refused_alike(capsys, recipe)
    assert sentence.startswith(f"engine.kv_cache_bytes = {need - 1}: vLLM needs {need} bytes for one request of 131072")
    for engine in ("", f"[engine]\nkv_cache_bytes = {need}\n"):
        recipe = policy_recipe(tmp_path, folder, engine)
        assert "has no weights in safetensors format" in refused_alike(capsys, recipe)


def test_kv_cache_above_4_gib_must_be_configured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}
    folder = make_policy(tmp_path / "policy", max_position_embeddings=2**20, **shape)
    sentence = refused_alike(capsys, policy_recipe(tmp_path, folder))
    assert sentence.startswith(f"engine.kv_cache_bytes = {2**28}: vLLM needs {(2**20 + 32) * 4096} bytes")
    assert "the policy's context; set" in sentence
    for length in (2**19, 2**20 - 32):
        recipe = policy_recipe(tmp_path, folder, f"[engine]\nmax_model_len = {length}\n")
        fits = (length + 32) * 4096 <= 4 << 30
        found = "has no weights in safetensors format" if fits else f"{length} tokens, engine.max_model_len; set"
        assert found in refused_alike(capsys, recipe)


def test_recipe_that_needs_more_gpus_than_a_node_has_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.flows.ray_cluster.cluster.count_machine_gpus", lambda: 1.0)
    sentence = refused_alike(capsys, RECIPE, "--set", "train.ranks=2")
    assert sentence.startswith("train.ranks = 2: all ranks must fit on one node, because train.multi_node is false")
    sentence = refused_alike(capsys, RECIPE, "--set", "engine.tensor_parallel=2")
    assert sentence.startswith(
        "engine.tensor_parallel = 2: an engine must fit on one node, but the largest node has only 1 GPUs"
    )


@pytest.mark.parametrize(("library", "key"), [("vllm", "engine.kind"), ("deepspeed", "train.kind")])
def test_recipe_that_needs_a_missing_library_is_refused(
    library: str, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.flows.preflight.find_spec", lambda name: None)
    override = "train={kind = 'deepspeed'}" if library == "deepspeed" else "seed=1"
    engine = ("--set", "engine.kind=transformers") if library == "deepspeed" else ()
    sentence = refused_alike(capsys, RECIPE, "--set", override, *engine)
    assert sentence.startswith(f"{key} = '{library}': ")
    assert "is not installed on this machine; install it with `pip install" in sentence


def test_check_command_lists_skipped_checks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`rollflow check` downloads nothing, and contacts no service that `--offline` rules out."""
    (recipe := tmp_path / "recipe.toml").write_text('[policy]\npath = "nobody-here/no-such-policy"\n')
    assert main(["check", str(recipe)]) == 0
    assert (
        "'nobody-here/no-such-policy' is not in this machine's cache of the Hugging Face hub" in capsys.readouterr().out
    )
    assert main(["check", RECIPE, "--offline", "--set", "store.uri=s3://bucket/prefix"]) == 0
    assert "not asked: store.uri" in capsys.readouterr().out


def test_policy_with_an_invalid_config_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", model_type="qwen2", layer_types=["full_attention"] * 5)
    sentence = refused_alike(capsys, policy_recipe(tmp_path, folder, '[engine]\nkind = "transformers"\n'))
    assert "transformers cannot read the policy's config.json (ValueError: `num_hidden_layers` (2) must be" in sentence


def test_prompt_longer_than_the_context_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", max_position_embeddings=70)
    sentence = refused_alike(capsys, policy_recipe(tmp_path, folder))
    assert "prompts.0: 512 of the first 512 prompts are too long (for example " in sentence
    assert "tokens, and the context leaves room for 6); shorten it" in sentence


def test_more_new_tokens_than_the_context_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", max_position_embeddings=32)
    sentence = refused_alike(capsys, policy_recipe(tmp_path, folder))
    assert "engine.max_new_tokens = 64" in sentence


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "the file has no lines"),
        (b'{"question": "1+1"}', "line 1: it has no answer"),
        (b'{"question": "1+1", "answer": 2}\n' * 3, "evaluation.prompts = 256: no prompt is held out"),
        (b'{"question": "1+1", "answer": 2}\n' * 30, "no line of the file is left to train on"),
    ],
    ids=["missing", "empty", "no answer", "too few to hold out", "one question"],
)
def test_check_command_reads_prompt_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, words: str
) -> None:
    file, recipe = tmp_path / "mine.jsonl", tmp_path / "recipe.toml"
    if content is not None:
        file.write_bytes(content)
    recipe.write_text(f'[policy.cold_start]\n[reward]\nkind = "exact"\n[[prompts]]\nkind = "jsonl"\npath = "{file}"\n')
    assert words in refused(capsys, "check", str(recipe))
    file.write_text("".join(f'{{"question": "{i}+1", "answer": {i + 1}}}\n' for i in range(30)))
    assert main(["check", str(recipe)]) == 0
    assert "evaluation.prompts = 256: only 3 prompts are held out" in capsys.readouterr().out


def test_check_command_refuses_a_bad_policy_folder_or_output_uri(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sentence = refused(capsys, "check", policy_recipe(tmp_path, tmp_path / "no-model"))
    assert "policy.path" in sentence
    assert "there is no such folder" in sentence
    folder = make_policy(tmp_path / "policy")
    assert "has no weights in safetensors format" in refused_alike(capsys, policy_recipe(tmp_path, folder))
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(capsys, "check", policy_recipe(tmp_path, folder))
    (tmp_path / "file").write_text("")
    for key, value in (
        ("store.uri", f"{tmp_path}/file/below"),
        ("tracking.uri", f"sqlite:///{tmp_path}/file/below/db"),
    ):
        assert f"{key} = '{value}' cannot be written" in refused(capsys, "check", RECIPE, "--set", f"{key}={value}")


@pytest.mark.parametrize(
    "command",
    [["serve"], ["serve", "--background"], ["serve", "--end"], ["deploy", "flows/recipes"]],
    ids=lambda words: words[-1],
)
def test_unwritable_run_home_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROLLFLOW_HOME", f"{tmp_path}/file")
    assert "set ROLLFLOW_HOME to a folder that can be" in refused(capsys, *command)


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "a\0b"])
def test_invalid_path_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe := Path(os.environ["ROLLFLOW_HOME"]).with_suffix(".toml")).write_text(
        f'[[prompts]]\nkind = "jsonl"\npath = {json.dumps(path)}\n[reward]\nkind = "exact"\n'
    )
    said = refused(capsys, "check", str(recipe))
    assert said.startswith("prompts.path = ")
    assert f"{path!r} cannot be read: "[1:] in said
    if path.startswith("~"):
        for arguments in (["check", RECIPE, "--set", f"store.uri={path}"], ["status", path]):
            assert f"{path}' names the home folder of an unknown user" in refused(capsys, *arguments)


def test_existing_run_id_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    describe(open_store(str(tmp_path / "home/store/runs/mine")), "mine")
    sentence = refused(capsys, "run", RECIPE, "--run-id", "mine")
    assert sentence.startswith("run id 'mine' already exists in ")
    assert "--run-id" in sentence


def test_unwritable_store_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sentence = refused_alike(capsys, RECIPE, "--set", f"store.uri={tmp_path}/file/below")
    assert "store.uri" in sentence
    assert "file/below" in sentence


def test_folder_store_of_a_remote_cluster_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The check comes before any connection, because nothing answers at the cluster's address."""
    sentence = refused_alike(capsys, RECIPE, "--set", "cluster.address=192.0.2.7:6379")
    assert sentence.startswith(f"store.uri = '{tmp_path}/home/store' is a folder of this machine, which 192.0.2.7 of ")
    assert "cluster.address = '192.0.2.7:6379' cannot read; use s3://bucket/prefix" in sentence


def test_folder_store_with_remote_nodes_is_refused() -> None:
    check_store_reach("/a/folder", "127.0.0.1:6379", ["127.0.0.1", "::1"])
    check_store_reach("/a/folder", "auto", ["192.0.2.7"])
    check_store_reach("s3://bucket/prefix", "127.0.0.1:6379", ["192.0.2.7"])
    with pytest.raises(
        ConfigError, match=r"store\.uri = 'file:///a/folder' is .* which 192\.0\.2\.7, 192\.0\.2\.8 of "
    ):
        check_store_reach("file:///a/folder", "127.0.0.1:6379", ["127.0.0.1", "192.0.2.8", "192.0.2.7"])


def test_unreachable_service_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert f"cluster.address = '{address}'" in refused_alike(capsys, RECIPE, "--set", f"cluster.address={address}")
    uri = f"http://{address}"
    assert f"tracking.uri = '{uri}'" in refused_alike(capsys, RECIPE, "--set", f"tracking.uri={uri}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", uri)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    # each command's error contains the name of its own probe object, so the errors are not compared
    for verb in ("check", "run"):
        sentence = refused(capsys, verb, RECIPE, "--set", "store.uri=s3://bucket/runs")
        assert "store.uri = 's3://bucket/runs'" in sentence
    monkeypatch.setenv("PREFECT_API_URL", f"{uri}/api")
    assert f"PREFECT_API_URL = '{uri}/api'" in refused_alike(capsys, RECIPE)
    assert f"PREFECT_API_URL = '{uri}/api'" in refused(capsys, "serve")


def test_unreachable_database_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}/prefect"
    sentence = refused(capsys, "serve", "--database", f"postgresql+asyncpg://me@{address}")
    assert f"--database 'postgresql+asyncpg://{address}': " in sentence
    assert "PGPASSWORD" in sentence


def test_unknown_reasoning_gym_data_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    family = ["--set", "reward.kind=reasoning-gym", "--set", "prompts.0.kind=reasoning-gym"]
    sentence = refused_alike(capsys, RECIPE, *family, "--set", "prompts.0.family=no_such_family")
    assert "prompts.family = 'no_such_family'" in sentence
    sentence = refused_alike(capsys, RECIPE, *family, "--set", "prompts.0.options.depth=3")
    assert "prompts.options" in sentence


def test_missing_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run in" in refused(capsys, "audit", "nobody")
    assert "there is no run in" in refused(capsys, "status")


def test_check_command_imports_no_large_library() -> None:
    code = f"""
import sys
from rollflow.flows import prepare
from rollflow.flows.commands.cli import main
from rollflow.flows.locations import attach_run
assert main(["check", "{RECIPE}"]) == 0
assert main(["check", "{RECIPE}", "--offline", "--set", "store.uri=s3://bucket/prefix"]) == 0
heavy = {{"torch", "ray", "vllm", "prefect", "mlflow", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


def test_second_run_with_the_same_id_keeps_the_first_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands that start in the same second have the same run id by default: `for s in 0 1; do rollflow run R
    --set seed=$s & done`.
    """

    def config(hidden: int) -> RunConfig:
        return RunConfig(policy=PolicyConfig(cold_start=ColdStart(hidden_size=hidden, heads=1)))

    place, prepared = prepare._store_files, list[RunContext]()

    def placed(*arguments: Any) -> None:
        if not prepared:  # the other command prepares the same run a moment earlier
            prepared.append(attach_run(f"{tmp_path}/home/store/runs/same"))
            prepare.prepare(config(32), "same")
        place(*arguments)

    monkeypatch.setattr(prepare, "_store_files", placed)
    with pytest.raises(ConfigError, match="run id 'same': another policy was prepared under this id"):
        prepare.prepare(config(64), "same")
    assert json.loads(prepared[0].store.get("policy/config.json"))["hidden_size"] == 32


def test_killed_preparation_of_a_run_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    config = RunConfig(policy=PolicyConfig(cold_start=ColdStart(hidden_size=32, heads=1)))
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "store_prompts", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(config, "same")
    assert prepare.prepare(config, "same").run_id == "same"
