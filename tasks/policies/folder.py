"""The policy folder of a run: a Hugging Face model folder with config and tokenizer, but without weights.

Every process of a run reads config and tokenizer from the run's policy folder, and the weights of policy versions from
the policy store. This module does not import torch, so that a command can check a policy fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.disk import map_file
from rollflow.tasks.policies.config import ColdStart

END, PAD = "<|end|>", "<|pad|>"
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)


def build_cold_folder(cold: ColdStart, texts: Iterable[str]) -> dict[str, bytes]:
    """Build the files of a small Llama policy with tied embeddings and a byte-level BPE tokenizer trained on
    `texts`.

    The architecture is Llama, because every tool reads the `tokenizer.json` of a Llama model unchanged.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Each digit is a token, so that the policy can learn to add; a token may span several words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=cold.vocabulary, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": cold.context,
        "clean_up_tokenization_spaces": False,
        **({} if cold.chat_template is None else {"chat_template": cold.chat_template}),
    }
    ends = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    return {
        "config.json": _json(_llama(cold, tokenizer.get_vocab_size()) | ends),
        "generation_config.json": _json(ends),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": _json(described),
    }


def _llama(cold: ColdStart, vocabulary: int) -> dict[str, Any]:
    """Build the contents of a Llama model's config.json, without the ids of special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": cold.hidden_size,
        "intermediate_size": 4 * cold.hidden_size,
        "num_hidden_layers": cold.layers,
        "num_attention_heads": cold.heads,
        "num_key_value_heads": cold.heads,
        "max_position_embeddings": cold.context,
        "hidden_act": "silu",
        "initializer_range": 0.06,  # with 0.02, a narrow model needs twice as many training steps
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": True,  # shortens the cold start
        "attention_dropout": 0.0,
        "bos_token_id": None,
    }


def find_local_policy(path: str, key: str = "policy.path") -> Path | None:
    """Return the folder `path` after checking its files, or None if `path` is the name of a model on the Hugging Face
    hub.

    Error messages name the config key `key`.
    """
    folder = Path(os.path.expanduser(path))  # `expanduser` leaves an unknown "~name" unchanged
    if folder.is_dir():
        return _check_complete(path, folder, key)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            f"{key} = {path!r}: there is no such folder; name a folder with a Hugging Face model, or a "
            "model on the Hugging Face hub"
        )
    return None


def find_policy(path: str, download: bool = True, key: str = "policy.path") -> Path | None:
    """Return the local folder of a policy. A model on the Hugging Face hub is downloaded into the hub's cache.

    With `download=False`, the result is None for a model that is not in the cache.
    """
    if (folder := find_local_policy(path, key)) is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
    try:
        found = snapshot_download(path, allow_patterns=wanted, local_files_only=not download)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if not download and isinstance(error, LocalEntryNotFoundError):
            return None
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{key} = {path!r} is not a folder on this machine, and the model cannot be downloaded from the hub "
            f"({reason}); download the model first"
        ) from None
    return _check_complete(path, Path(found), key)


def resolve_policy(path: str, key: str = "policy.path") -> Path:
    """Return the local folder of a policy; download the policy from the hub if necessary."""
    found = find_policy(path, key=key)
    assert found is not None, "what is downloaded is there"
    return found


def is_weights(path: str) -> bool:
    """Return whether a file in a policy's folder belongs to the policy's weights.

    Files named `consolidated*`, a second copy of the weights on the hub, are ignored by transformers.
    """
    name = path.rpartition("/")[2]
    return name.endswith((".safetensors", ".safetensors.index.json")) and not name.startswith("consolidated")


def weight_paths(path: str, key: str = "policy.path") -> list[Path]:
    """List the paths of an existing policy's weight files."""
    files = sorted(file for file in resolve_policy(path, key).iterdir() if is_weights(file.name))
    if not files:
        raise ConfigError(
            f"{key} = {path!r} has no weights in safetensors format; save the weights with save_pretrained"
        )
    return files


def weight_files(path: str, key: str = "policy.path") -> dict[str, Data]:
    """Memory-map the weight files of an existing policy, on the learner's machine."""
    return {file.name: map_file(file) for file in weight_paths(path, key)}


def _check_complete(path: str, folder: Path, key: str) -> Path:
    unread = [folder] if not os.access(folder, os.R_OK | os.X_OK) else sorted(folder.iterdir())
    for file in unread:
        is_used = file == folder or file.name in COPIED or is_weights(file.name)
        if is_used and not os.access(file, os.R_OK):
            raise ConfigError(f"{key} = {path!r}: this user may not read {str(file)!r}; allow reading (chmod a+r)")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{key} = {path!r} has no config.json; name a folder with a Hugging Face model")
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(
            f"{key} = {path!r} has no tokenizer.json; save a fast tokenizer into the folder (save_pretrained)"
        )
    return folder


def copy_folder(path: str, key: str = "policy.path") -> dict[str, bytes]:
    """Read the files of an existing policy that a run copies into its policy folder: all files except the weights."""
    folder = resolve_policy(path, key)
    return {name: (folder / name).read_bytes() for name in COPIED if (folder / name).exists()}


def set_dtype(files: dict[str, bytes], dtype: str) -> dict[str, bytes]:
    """Return the files of a policy folder with the data type `dtype` in config.json.

    Other tools, such as vLLM, load weights in the data type that config.json names. Log-probs would differ if a tool
    used another data type than the learner.
    """
    try:
        config = dict(json.loads(files["config.json"]))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"policy.path: the policy's config.json is not a JSON object ({error}); save the policy again"
        ) from None
    config.pop("dtype", None)  # only the key `torch_dtype` is read by all versions of transformers
    return files | {"config.json": _json(config | {"torch_dtype": dtype})}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, indent=2).encode()
