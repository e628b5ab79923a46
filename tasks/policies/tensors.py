"""Checks that the tensors in a policy folder are exactly those of the model.

    headers   every file is whole, and an index names each tensor once, with the file that contains the tensor
    names     when transformers loads the folder without values, no tensor is missing, left over or of another shape
    ties      two tensors that the config ties are equal
    values    no value is NaN or infinite in the data type of training

Files are memory-mapped, with at most `PIECE` values in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.attention import choose_attention
from rollflow.tasks.policies.folder import is_weights
from rollflow.tasks.policies.head import LMHead

PIECE = 2**22  # largest number of a tensor's values in memory at a time
SHOWN = 4  # largest number of tensor names in one error message
TRIED_BYTES = 2**28  # largest size, in bytes, of a model that is tested before a run starts
TRIED_TOKENS = 8  # number of tokens with which a model is tested
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAVE = "save the policy again (save_pretrained)"


def check_tensors(folder: Path, dtype: str) -> int:
    """Check the weights in `folder`; return the number of tokens for which the model has both embeddings and logits.

    Raises:
        ConfigError: the weights fail a check; the message names the tensors or the file.
    """
    where = _read_headers(folder)
    model, info = _load_names(folder, dtype, "meta")
    shapes = [f"{name} {tuple(found)} instead of {tuple(asked)}" for name, found, asked in info["mismatched_keys"]]
    wrong = {"missing": info["missing_keys"], "unknown": info["unexpected_keys"], "misshapen": shapes}
    if faults := [f"{fault} tensors: {_list_names(names)}" for fault, names in wrong.items() if names]:
        raise _refusal(f"the weights do not fit {type(model).__name__}: {'; '.join(faults)}")
    if info["error_msgs"]:
        raise _refusal(f"transformers cannot load the weights ({_first_line(info['error_msgs'][0])})")
    _check_ties(model, where)
    _check_values(where, getattr(torch, dtype))
    _try_model(folder, dtype, model)
    return min(len(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()))


def _read_headers(folder: Path) -> dict[str, Path]:
    """Read the headers of the weight files; return a mapping from each tensor's name to its file.

    Raises:
        ConfigError: the weight files do not match the index of the weights, or a file is truncated.
    """
    files = sorted(file for file in folder.glob("*.safetensors") if is_weights(file.name))
    indices = [file for file in folder.glob("*.safetensors.index.json") if is_weights(file.name) and file.name != INDEX]
    index = _read_index(folder)
    if index is not None and (folder / WHOLE).exists():
        raise _refusal(
            f"the folder has both {WHOLE} and {INDEX}; remove the one that does not belong to the policy", ""
        )
    named = {WHOLE} if index is None else set(index.values())
    if absent := [name for name in named if not (folder / name).is_file()]:
        raise _refusal(f"the policy's weight files {_list_names(absent)} are missing")
    if others := [file.name for file in (*files, *indices) if file.name not in named]:
        raise _refusal(f"{_list_names(others)} does not belong to the policy's weights; move it out of the folder", "")
    where: dict[str, Path] = {}
    for file in files:
        for name in _check_names(file):
            if name in where:
                raise _refusal(f"the tensor {name} is stored twice, in {where[name].name} and in {file.name}")
            where[name] = file
    listed = {name: folder / file for name, file in (index or {}).items()}
    if index is not None and listed != where:
        wrong = {name for name in {*listed, *where} if listed.get(name) != where.get(name)}
        raise _refusal(f"{INDEX} names files that do not contain the tensors {_list_names(wrong)}")
    return where


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        return {str(name): str(file) for name, file in json.loads(path.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _refusal(f"{INDEX} is not a valid index of tensors") from None


def _check_names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _refusal(f"{file.name} is truncated or not a safetensors file ({_first_line(error)})") from None


def _load_names(folder: Path, dtype: str, device: str) -> tuple[Any, Mapping[str, Any]]:
    """Load the model on `device`; the device "meta" loads no values. Return the model and transformers' loading
    info.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with silence_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if getattr(config, "quantization_config", None):
                words = (
                    "the policy's weights are quantized (quantization_config); save the policy in float32 or bfloat16"
                )
                raise _refusal(words, "")
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                device_map=device,
                attn_implementation=choose_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
            )
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - an architecture's code may raise anything here
        raise _refusal(f"transformers cannot open the policy ({type(error).__name__}: {_first_line(error)})") from None
    return model, info


def _check_ties(model: Any, where: Mapping[str, Path]) -> None:
    """Reject two tied tensors whose stored values differ, because engines would use the same values for both
    tensors."""
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target in where and source in where:
            pairs = zip(_pieces(where[target], target), _pieces(where[source], source), strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                cure = "set tie_word_embeddings = false in its config.json, or save the policy again"
                raise _refusal(
                    f"the policy's config.json ties {target} to {source}, but their values differ; {cure}", ""
                )


def _check_values(where: Mapping[str, Path], dtype: torch.dtype) -> None:
    broken = [name for name, file in where.items() if not all(map(_is_finite(dtype), _pieces(file, name)))]
    if broken:
        raise _refusal(f"the tensors {_list_names(broken)} contain NaN or infinite values")


def _is_finite(dtype: torch.dtype) -> Any:
    return lambda part: not part.is_floating_point() or bool(part.to(dtype).isfinite().all())


def _pieces(file: Path, name: str) -> Iterator[Tensor]:
    """Yield the values of a tensor in a weight file, some rows at a time."""
    with safe_open(file, "pt") as opened:
        part = opened.get_slice(name)
        shape = part.get_shape()
        if not shape:
            yield opened.get_tensor(name)
            return
        row = 1
        for size in shape[1:]:
            row *= size
        rows = max(1, PIECE // max(1, row))
        for begin in range(0, shape[0], rows):
            yield part[begin : begin + rows]


def _try_model(folder: Path, dtype: str, empty: Any) -> None:
    """Run a small model as the learner and an engine do; reject it if its logits contain a NaN or an infinity."""
    if sum(tensor.nbytes for tensor in empty.parameters()) > TRIED_BYTES:
        return
    model, _ = _load_names(folder, dtype, "cpu")
    LMHead(model.eval())
    tokens = torch.arange(TRIED_TOKENS)[None]
    with torch.no_grad():
        logits = [model(input_ids=tokens, use_cache=cached).logits for cached in (False, True)]
    if not all(one.isfinite().all() for one in logits):
        raise _refusal(f"the policy's model computes NaN or infinite logits; correct its config.json, or {SAVE}", "")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers in a `with` block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    left = len(ordered) - SHOWN
    return ", ".join(ordered[:SHOWN]) + (f" and {left} more" if left > 0 else "")


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _refusal(why: str, cure: str = SAVE) -> ConfigError:
    return ConfigError(f"policy.path: {why}" + (f"; {cure}" if cure else ""))
