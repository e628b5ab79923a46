"""A slightly wrong policy folder is refused in one sentence, or the run uses it as other tools do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollflow.flows.preflight import preflight
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.policies.folder import weight_files
from rollflow.tasks.policies.tensors import SAVE, check_tensors
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run.context import RunContext
from tests.support.policy_folders import (
    CHAT,
    CONTEXT,
    END,
    OVER,
    START,
    change_json,
    change_tensors,
    make_folder,
    make_tokenizer,
    recipe_of,
)
from tests.support.small_run import Halt, StoreFeed

DOWN = "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))


def refusal(folder: Path, **prompts: object) -> str:
    """Return the sentence with which the preflight refuses a run of this folder."""
    with pytest.raises(ConfigError) as caught:
        preflight(recipe_of(folder, **prompts))
    [line] = str(caught.value).splitlines()
    return line


# --- tensors ------------------------------------------------------------------------------------------------


def with_value(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[name][-1, -1] = value
        return tensors

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: {k: v for k, v in w.items() if k != DOWN},
            f"do not fit LlamaForCausalLM: missing tensors: {DOWN}; ",
        ),
        (
            lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"},
            "do not fit LlamaForCausalLM: missing tensors: lm_head.weight; ",
        ),
        (lambda w: {f"module.{k}": v for k, v in w.items()}, "unknown tensors: module.lm_head.weight, "),
        (lambda w: {**w, "extra.weight": torch.ones(2)}, "unknown tensors: extra.weight; "),
        (lambda w: {**w, DOWN: w[DOWN][:, 1:].clone()}, f"{DOWN} (64, 63) instead of (64, 64); "),
        (with_value(DOWN, float("nan")), f"the tensors {DOWN} contain NaN or infinite values; "),
        (with_value("lm_head.weight", float("-inf")), "the tensors lm_head.weight contain NaN or infinite values; "),
    ],
    ids=["missing tensor", "missing head", "prefixed names", "unused", "shape", "nan", "inf"],
)
def test_weights_that_do_not_match_the_model_are_refused(
    tmp_path: Path, change: Callable[[Tensors], Tensors], words: str
) -> None:
    folder = make_folder(tmp_path / "policy", tie_word_embeddings=False)
    change_tensors(folder, change)
    assert words in refusal(folder)


def test_weight_too_large_for_the_trained_dtype_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    change_tensors(folder, lambda w: {**w, DOWN: torch.full_like(w[DOWN], 1e39, dtype=torch.float64)})
    with pytest.raises(ConfigError, match=f"the tensors {DOWN} contain NaN or infinite values"):
        check_tensors(folder, "float32")


def split(folder: Path) -> dict[str, Any]:
    """Save the folder's weights as two files; return the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_wrong_index_of_weight_files_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    index = split(folder)
    check_tensors(folder, "float32")
    a, b = (load_file(folder / name) for name in ("a.safetensors", "b.safetensors"))
    name = next(iter(a))

    def refused(words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            check_tensors(folder, "float32")

    write_index(folder, {"weight_map": {k: v for k, v in index["weight_map"].items() if k != name}})
    refused(f"names files that do not contain the tensors {name}")
    write_index(folder, {"weight_map": {**index["weight_map"], "x": "a.safetensors"}})
    refused("names files that do not contain the tensors x")
    write_index(folder, {"weight_map": {**index["weight_map"], "x": "c.safetensors"}})
    refused("weight files c.safetensors are missing")
    write_index(folder, {"weight_map": [1]})
    refused("is not a valid index of tensors")
    write_index(folder, index)
    save_file({**b, name: a[name] + 1}, folder / "b.safetensors", metadata={"format": "pt"})
    refused(f"{name} is stored twice, in a.safetensors and in b.safetensors")
    save_file(b, folder / "b.safetensors", metadata={"format": "pt"})
    save_file({"x": torch.ones(1)}, folder / "other.safetensors")
    refused("other.safetensors does not belong to the policy's weights")


def test_weights_in_another_tools_format_are_skipped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    save_file({"tok_embeddings.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    check_tensors(folder, "float32")
    assert "consolidated.safetensors" not in weight_files(str(folder))


def test_unused_files_of_a_policy_folder_may_be_unreadable(tmp_path: Path) -> None:
    """Unused files are, for example, links in the hub's cache to weights in other formats that were not downloaded."""
    folder = make_folder(tmp_path / "policy")
    (folder / "pytorch_model.bin").symlink_to(tmp_path / "not downloaded")
    assert list(weight_files(str(folder))) == ["model.safetensors"]
    preflight(recipe_of(folder))


def test_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    whole = (folder / "model.safetensors").read_bytes()
    for size in (len(whole) - 1, 100, 0):
        (folder / "model.safetensors").write_bytes(whole[:size])
        assert "model.safetensors is truncated or not a safetensors file" in refusal(folder)


def test_tied_weight_tensors_must_be_equal(tmp_path: Path) -> None:
    """Transformers would not tie unequal tensors, while engines would."""
    folder = make_folder(tmp_path / "policy")
    change_tensors(folder, lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"].clone()})
    check_tensors(folder, "float32")
    change_tensors(folder, with_value("lm_head.weight", 7.0))
    assert "ties lm_head.weight to model.embed_tokens.weight, but their values differ" in refusal(folder)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    assert "weights are quantized" in refusal(folder)


def test_weights_that_give_nan_logits_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    change_json(folder / "config.json", rms_norm_eps=-1000.0)
    assert refusal(folder).endswith("NaN or infinite logits; correct its config.json, or " + SAVE)


def test_weight_names_that_transformers_converts_are_accepted(tmp_path: Path) -> None:
    """Old checkpoints store each expert separately; transformers fuses the experts when it loads them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "policy"
    size = make_tokenizer(folder)
    shape = {"vocab_size": size, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "eos_token_id": END}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **shape, **heads, **more)).save_pretrained(folder)
    names = load_file(folder / "model.safetensors")
    assert any(".experts.1.w" in name for name in names), sorted(names)
    check_tensors(folder, "float32")
    del names["model.layers.0.block_sparse_moe.experts.1.w2.weight"]
    save_file(names, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"policy\.path: "):
        check_tensors(folder, "float32")


# --- version 0 ----------------------------------------------------------------------------------------------


class NoFeed(StoreFeed):
    """A feed that stops the learner when it asks for its first batch."""

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> Any:
        raise Halt


def first_version(config: Any) -> RunContext:
    """Run a learner until it has published version 0, and no further."""
    context = prepare(config, "first")
    with pytest.raises(Halt):
        LearnerActor(context, channel=NoFeed(context)).run()
    return context


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_version_0_equals_the_policy_folder(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = make_folder(tmp_path / "policy", kind)
    config = recipe_of(folder)
    context = first_version(config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})}))
    given = load_file(folder / "model.safetensors")
    stored = {k: v for file in context.weights(0).glob("*.safetensors") for k, v in load_file(file).items()}
    assert stored.keys() == given.keys()
    assert all(torch.equal(stored[name], given[name].to(getattr(torch, dtype))) for name in given)


# --- tokens -------------------------------------------------------------------------------------------------


def test_token_without_an_embedding_row_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    rows = make_tokenizer(folder, plain=["What is"]) - 1
    assert (
        f"the token 'What is' of the policy's tokenizer has id {rows}, but the model has only {rows} embedding rows"
        in refusal(folder)
    )


def test_end_token_without_an_embedding_row_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    change_json(folder / "generation_config.json", eos_token_id=[END, 5000])
    assert "end token 5000 does not exist in the model" in refusal(folder)


@pytest.mark.parametrize("value", [-1, "x", 1.5, True, [END, None]])
def test_invalid_end_token_id_is_refused(tmp_path: Path, value: object) -> None:
    folder = make_folder(tmp_path / "policy")
    change_json(folder / "generation_config.json", eos_token_id=value)
    assert "policy.path: the policy's eos_token_id" in refusal(folder)


def test_end_tokens_are_collected_from_all_config_files(tmp_path: Path) -> None:
    """End tokens come from config, generation config, tokenizer, and the template's end of turn."""
    folder = make_folder(tmp_path / "policy", tokenizer={"template": CHAT, "end": "<|start|>"}, eos_token_id=END)
    change_json(folder / "generation_config.json", eos_token_id=[END, 9])
    found = preflight(recipe_of(folder))
    assert json.loads(found.files["generation_config.json"])["eos_token_id"] == [END, 9, START, OVER]
    assert any(note.startswith("end tokens: <|end|> (1), ") and "<|over|> (4)" in note for note in found.notes)
    context = prepare(recipe_of(folder), "ends")
    assert context.tokenizer.stop_tokens == (END, 9, START, OVER)


def test_policy_folder_without_an_end_token_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", tokenizer={"end": None}, eos_token_id=None)
    assert "no end-of-sequence token" in refusal(folder)


@pytest.mark.parametrize(("around", "starts"), [("<|start|> $A", 1), ("$A <|end|>", 0), ("<|start|> $A <|end|>", 1)])
@pytest.mark.parametrize("question", ["Say 7.", "<|start|>Say 7."])
def test_prompts_have_one_start_token_and_no_end_token(tmp_path: Path, around: str, starts: int, question: str) -> None:
    make_folder(tmp_path / "policy", tokenizer={"around": around})
    found = PolicyTokenizer(tmp_path / "policy").encode(question)
    assert found.count(START) == max(starts, question.startswith("<|start|>"))
    assert END not in found
    recorded = PolicyTokenizer(tmp_path / "policy", single_start=False).encode(question)
    assert recorded.count(END) == ("<|end|>" in around)  # older recorded runs keep their tokens


def test_start_token_of_a_template_is_not_doubled(tmp_path: Path) -> None:
    made = {"template": "<|start|>" + CHAT, "start": "<|start|>", "around": "<|start|> $A"}
    folder = make_folder(tmp_path / "policy", tokenizer=made, bos_token_id=START)
    found = PolicyTokenizer(folder).encode("Say 7.", chat=True)
    assert (found[0], found.count(START)) == (START, 1)
    rendered = "<|start|><|turn|>user\nSay 7.<|over|>\n<|turn|>assistant\n"
    assert PolicyTokenizer(folder).encode(rendered) == found
    preflight(recipe_of(folder, chat=True))


def test_prompt_with_end_token_or_two_start_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", tokenizer={"around": "<|start|> $A", "start": "<|start|>"})
    for question, words in (("Say 7.<|end|>", "ends with the end token <|end|> (1)"), ("<|start|><|start|>x", "two")):
        with pytest.raises(ConfigError, match=words.replace("|", r"\|").replace("(", r"\(").replace(")", r"\)")):
            PolicyTokenizer(folder).encode_prompt(question)
    make_tokenizer(folder, "{{ messages[-1]['content'] }}<|over|>")
    assert "the chat template's prompt ends with the end token <|over|> (4)" in refusal(folder, chat=True)


# --- context ------------------------------------------------------------------------------------------------


def test_context_length_is_found_under_every_config_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", "gpt2")
    assert PolicyTokenizer(folder).context == CONTEXT
    assert "the transformers engine cannot run a model of type gpt2" in refusal(folder)
    config = recipe_of(folder)
    vllm = parse_engine(config, "vllm")
    assert len(preflight(vllm).probe) == 32


def parse_engine(config: Any, kind: str) -> Any:
    from rollflow.flows.config import parse_config

    tree = config.model_dump(mode="json", exclude_unset=True)
    return parse_config({**tree, "engine": {"kind": kind, "max_new_tokens": 8}})


# --- templates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('none here') }}{% endif %}" + CHAT, "(none here)"),
        (CHAT.replace("in messages", "in messages if m['role'] != 'system'"), "leaves the system message out"),
        (CHAT.replace("m['content']", "m['content'] + 1"), "template fails ("),
        ("{% for", "template fails ("),
        ("<|turn|>assistant\n", "leaves the question out"),
        (CHAT + "{{ ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'] * 999999 | random }}", "template"),
    ],
    ids=["refuses", "drops", "fails", "syntax", "no question", "lots"],
)
def test_chat_template_that_omits_prompt_text_is_refused(tmp_path: Path, template: str, words: str) -> None:
    folder = make_folder(tmp_path / "policy", tokenizer={"template": template})
    assert words in refusal(folder, chat=True, system="Be kind.")


def test_system_message_without_chat_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", tokenizer={"template": CHAT})
    assert "prompts.0.system = 'Be kind.': the system message is not used without chat = true" in refusal(
        folder, system="Be kind."
    )


def test_chat_template_gets_the_time_of_the_runs_start(tmp_path: Path) -> None:
    clock = "It is {{ strftime_now('%Y-%m-%d %H:%M:%S') }}.\n"
    folder = make_folder(tmp_path / "policy", tokenizer={"template": clock + CHAT})
    context = prepare(recipe_of(folder, chat=True), "clock")
    shutil.rmtree(folder)
    begun = [RunContext(context.uri, context.cache) for _ in range(2)]
    assert begun[0].prompts().prompt(0).tokens == begun[1].prompts().prompt(0).tokens
    from datetime import UTC, datetime

    said = datetime.fromtimestamp(context.created_at, UTC).strftime("It is %Y-%m-%d %H:%M:%S.")
    assert context.tokenizer.template.render("Say 7.", None).startswith(said)


# --- attention ----------------------------------------------------------------------------------------------


def test_attention_softcap_is_applied(tmp_path: Path) -> None:
    """Training and the transformers engine apply the softcap; default attention ignores it."""
    folder = make_folder(tmp_path / "policy", "gemma2", scale=3.0)
    tokens = torch.arange(5, 40)[None]
    with torch.no_grad():
        found = load_model(folder, "float32", trained=True)(tokens).logits
        dropped = load_model(folder, "float32", trained=True, attention="default")(tokens).logits
    assert float((found - dropped).abs().max()) > 0.05
