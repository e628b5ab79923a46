"""Makes tiny reward models with random weights, whose tokenizer can encode every byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_reward_model(
    folder: Path, *, labels: tuple[str, ...] = ("good",), template: str = TEMPLATE, seed: int = 0, **keys: Any
) -> Path:
    """Make a random Qwen2 of width 32 with a classification head, and a tokenizer with a chat template."""
    files = build_cold_folder(ColdStart(context=128), ["What is 1 + 1? It is 2."] * 10)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(files["tokenizer.json"])
    described = json.loads(files["tokenizer_config.json"]) | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=320,  # transformers adds a token of Qwen2 to the tokenizer
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.5,  # a large range, so that scores differ clearly
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **{"pad_token_id": 0, **shape, **keys},
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder
