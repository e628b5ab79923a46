"""Makes tiny policy folders of several architectures, each with its own byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rollflow.flows.config import parse_config
from rollflow.tasks.run.config import RunConfig

NAMES = ("<|pad|>", "<|end|>", "<|start|>", "<|turn|>", "<|over|>")
PAD, END, START, TURN, OVER = range(5)
CHAT = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONTEXT = 128
SHAPE: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "tie_word_embeddings": True,
}
KINDS: Mapping[str, Mapping[str, object]] = {
    "llama": SHAPE,
    "qwen3": SHAPE | {"tie_word_embeddings": False},
    "gemma2": SHAPE
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 32}
    | {"layer_types": ["full_attention"] * 2},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": CONTEXT,
        "eos_token_id": END,
        "bos_token_id": None,
    },
}


@lru_cache(maxsize=1)
def _trained() -> str:
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=list(NAMES), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["Say 7 (3).", "What is 1 + 2?"], trainer)
    return str(made.to_str())


def make_tokenizer(
    folder: Path,
    template: str | None = None,
    *,
    end: str | None = "<|end|>",
    start: str | None = None,
    plain: Sequence[str] = (),
    around: str | None = None,
) -> int:
    """Save a tokenizer and return its number of tokens. `around` is the template of the tokens that it adds to a text,
    e.g. "<|start|> $A".
    """
    made = Tokenizer.from_str(_trained())
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    if around:
        ids = [(name, made.token_to_id(name)) for name in NAMES if name in around]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    more = {"bos_token": start} if start else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, pad_token="<|pad|>", clean_up_tokenization_spaces=False, **more
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return len(fast)


def make_folder(
    folder: Path,
    kind: str = "llama",
    *,
    tokenizer: Mapping[str, Any] | None = None,
    scale: float = 1.0,
    **changes: object,
) -> Path:
    """Make a policy folder with random weights, scaled by `scale`; `changes` are applied to its config."""
    torch.manual_seed(0)
    size = make_tokenizer(folder, **(tokenizer or {}))
    config = AutoConfig.for_model(kind, **{"vocab_size": size, **KINDS[kind], **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(folder)
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrite the folder's tensors as `change` returns them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_json(file: Path, **changes: object) -> None:
    """Set keys of a JSON file; a key whose value is `...` is removed."""
    tree = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))


def recipe_of(folder: Path, **prompts: object) -> RunConfig:
    """Return a recipe for the policy in a folder, with the transformers engine and with questions from the same
    folder.
    """
    file = folder / "say.jsonl"
    if not file.exists():
        file.write_text("".join(f'{{"question": "Say {i} ({i * i}).", "answer": "{i}"}}\n' for i in range(40)))
    return parse_config(
        {
            "policy": {"path": str(folder)},
            "versions": 2,
            "groups": 2,
            "group_size": 2,
            "engine": {"kind": "transformers", "max_new_tokens": 8},
            "prompts": [{"kind": "jsonl", "path": str(file), **prompts}],
            "reward": {"kind": "exact"},
            "evaluation": {"prompts": 4},
        }
    )
