"""Checks a policy folder before a run starts: config, weights, tokenizer, end tokens and chat template.

    files of the folder --> JSON that can be read --> tensors that fit --> a row for each token --> all end tokens

Code that reads the policy folder of a run relies on these checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.context import check_window
from rollflow.tasks.policies.stop import config_ends, stop_tokens, tokenizer_end, write_end_tokens
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.config import PromptConfig

OPTIONAL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


def check_files(folder: Path) -> None:
    """Reject a policy folder whose JSON files or tokenizer cannot be read, or whose special tokens are not text.

    Raises:
        ConfigError: a file of the policy folder is invalid; the message names the file.
    """
    for name in ("config.json", "tokenizer.json", *OPTIONAL):
        path = folder / name
        if name in OPTIONAL and not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"policy.path: the policy's {name} is not JSON ({error}); save the policy again"
            ) from None
        if not isinstance(found, dict):
            raise ConfigError(f"policy.path: the policy's {name} is not a JSON object; save the policy again")
    try:
        PolicyTokenizer(folder).encode("a")
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain `Exception`s
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"policy.path: the policy's tokenizer cannot be opened ({said}); save the tokenizer again"
        ) from None


def check_config(folder: Path) -> None:
    """Reject a config.json that transformers cannot read, or whose sliding window is not a number of tokens.

    Raises:
        ConfigError: config.json is invalid; the message names the invalid value, or quotes transformers' reason.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - a config's class may raise anything here
        said = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        why = f"transformers cannot read the policy's config.json ({said})"
        raise ConfigError(f"policy.path: {why}; save the policy again, or choose another architecture") from None
    check_window(json.loads((folder / "config.json").read_text()))


def name_end_tokens(folder: Path) -> None:
    """Write all end tokens of a policy into the policy folder's generation_config.json.

    End tokens are collected from config.json, generation_config.json, the tokenizer and the chat template.

    Raises:
        ConfigError: the policy folder names no end token.
    """
    tokenizer = PolicyTokenizer(folder)
    found = [*_config_ends(folder, "config.json"), *_config_ends(folder, "generation_config.json")]
    found += tokenizer_end(folder)
    if tokenizer.has_template and (end := tokenizer.template.end_of_turn(tokenizer.special)) is not None:
        found.append(end)
    if not found:
        raise ConfigError(
            "policy.path: the policy's tokenizer has no end-of-sequence token; set eos_token_id in "
            "config.json, or choose a policy that has such a token"
        )
    write_end_tokens(folder, tuple(dict.fromkeys(found)))


def _config_ends(folder: Path, name: str) -> list[int]:
    path = folder / name
    return config_ends(json.loads(path.read_text())) if path.exists() else []


def check_rows(tokenizer: PolicyTokenizer, rows: int) -> None:
    """Reject a tokenizer with a token id for which the model has no embedding; `rows` is the number of embeddings.

    Raises:
        ConfigError: the model has too few embeddings; the message names the first token without an embedding.
    """
    cure = "resize the model's embeddings (resize_token_embeddings), or remove the token"
    beyond = sorted((id, name) for name, id in tokenizer.vocabulary.items() if id >= rows)
    if beyond:
        id, name = beyond[0]
        raise ConfigError(
            f"policy.path: the token {name!r} of the policy's tokenizer has id {id}, but the model has only "
            f"{rows} embedding rows; {cure}"
        )
    if ends := [id for id in stop_tokens(tokenizer.folder) if id >= rows]:
        raise ConfigError(
            f"policy.path: the policy's end token {ends[0]} does not exist in the model, which has {rows} "
            "embedding rows; correct eos_token_id"
        )


def check_templates(sources: Iterable[PromptConfig], tokenizer: PolicyTokenizer) -> None:
    """Reject a chat template that omits the question or a prompt source's system message.

    Raises:
        ConfigError: the chat template fails a check; the message says what the user must change.
    """
    for chat, system in dict.fromkeys((source.chat, source.system) for source in sources):
        if chat:
            tokenizer.template.check(system)


def describe_ends(tokenizer: PolicyTokenizer) -> str:
    """Return a readable list of the tokenizer's end tokens."""
    return f"end tokens: {', '.join(map(tokenizer.name, tokenizer.stop_tokens))}"
