"""Makes a random Qwen2 of 0.1M parameters with tied embeddings, and computes its log-probs with transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

EOS = 1
VOCABULARY = 320


def make_policy(folder: Path) -> Path:
    """Make a policy folder: config.json, no weights."""
    _config().save_pretrained(folder)
    return folder


def make_weights(folder: Path, seed: int, *, tied: bool = True) -> Path:
    """Make weights for the tiny policy, or for one with an untied output head. Different seeds give very different
    weights.
    """
    torch.manual_seed(seed)
    config = _config()
    config.tie_word_embeddings = tied
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_letters(folder: Path) -> None:
    """Add a tokenizer to a policy folder: each token is a letter."""
    tokenizer = Tokenizer(WordLevel({letter(token): token for token in range(VOCABULARY)}, unk_token=letter(0)))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def letter(token: int) -> str:
    """Return the text of a token for the tokenizer of `make_letters`: one letter of two bytes."""
    return chr(0x100 + token)


def reference_logprobs(
    weights: Path, tokens: Sequence[int], temperature: float = 1.0, dtype: str = "float32"
) -> list[float]:
    """Compute the log-probability of each token of tokens[1:], given the tokens before it."""
    with torch.no_grad():
        logits = _model(weights, dtype)(torch.tensor([list(tokens)])).logits[0, :-1].float() / temperature
    following = torch.tensor(list(tokens[1:])).unsqueeze(-1)
    return torch.log_softmax(logits, -1).gather(-1, following).squeeze(-1).tolist()


def greedy_tokens(weights: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Compute the most probable continuation, one token after another."""
    model, tokens = _model(weights, "float32"), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def greedy_rows(weights: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Compute the most probable continuations, up to EOS, of prompts of one length."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(count):
        chances_NV = next_chances(weights, rows, 1.0)
        rows = [[*row, int(chances_V.argmax())] for row, chances_V in zip(rows, chances_NV, strict=True)]
    made = [row[len(prompts[0]) :] for row in rows]
    return [tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens for tokens in made]


def next_chances(weights: Path, rows: Sequence[Sequence[int]], temperature: float) -> NDArray[np.float64]:
    """Compute the probabilities of the next token after each of N rows of one length."""
    with torch.no_grad():
        logits_NV = _model(weights, "float32")(torch.tensor([list(row) for row in rows])).logits[:, -1].double()
    found: NDArray[np.float64] = torch.softmax(logits_NV / temperature, -1).numpy()
    return found


@functools.lru_cache(maxsize=4)
def _model(weights: Path, dtype: str) -> Any:
    """Load a model with these final weights."""
    return AutoModelForCausalLM.from_pretrained(weights, dtype=getattr(torch, dtype))


def _config() -> Qwen2Config:
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,  # a large range, so that token probabilities differ, also between two seeds
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
