"""A policy's own head: the model's own forward computes logits from the decoder's hidden states.

    hidden states --> the model's own forward --> logits
                      (hidden states replace the decoder's output)

A model's forward may compute more than a matrix product between hidden states and logits: a soft-cap (Gemma 2), a scale
(Granite, Cohere), a bias. So the model's own forward is run, and no part of it is implemented a second time. Training,
the probe, the transformers engine and the cold start all use `LMHead`. A model that cannot be run in this way is
rejected at the start of a run.

Shapes: M positions, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.adding_linear import AddingLinear

LOOK = 8  # number of tokens with which a model is tested
NEAR = {torch.float32: 1e-3}  # largest accepted difference of two computations of a log-prob, in nats, by data type
HALF = 0.05  # largest accepted difference in nats for data types that are not in `NEAR`, such as bfloat16


class _FixedDecoder(nn.Module):
    """A module that replaces a model's decoder and returns a given output."""

    output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return `output`, whatever the arguments are."""
        return self.output


class LMHead:
    """The head of `model`; the model's parameters are not copied. See the module's docstring."""

    vocabulary: int  # number of logits of each token

    def __init__(self, model: Any, *, judged: bool = True) -> None:
        """Find the head, and run the model on a few tokens. `judged` is False for a model that has no weights yet.

        Raises:
            ConfigError: the decoder and the head of the model cannot be run separately; or, with `judged`, their
            log-probs differ from the log-probs of the model's forward pass.
        """
        self._given = _FixedDecoder()
        try:
            decoder = model.get_decoder()
            self._head = _replace_module(model, decoder, self._given)
            self._linear = _replace_last_layer(self._head, model.get_output_embeddings())
            off = self._probe_model(model, decoder)
        except torch.OutOfMemoryError:
            raise  # lack of memory says nothing about the model's code
        except Exception as error:  # a model's own code may raise any error without its decoder
            raise _refusal(model, f"{type(error).__name__}: {error}") from error
        if judged and off > NEAR.get(model.dtype, HALF):
            raise _refusal(model, f"the log-probs differ by {off:.2g} nats")

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        """Return logits (M, V) in the model's data type; the model's forward gets the M hidden states as one row."""
        stand_in_1M = torch.zeros((1, len(hidden_MH)), dtype=torch.long, device=hidden_MH.device)
        self._given.output = self._kind(last_hidden_state=hidden_MH[None])
        try:
            return cast(Tensor, self._head(input_ids=stand_in_1M, use_cache=False).logits.squeeze(0))
        finally:
            self._given.output = None

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Make backward passes in the block add the last layer's gradient in place, without autograd.

        See `AddingLinear`. Nothing changes if the last layer is small, or has other parameters than a weight.
        """
        if self._linear is None or not self._linear.gains:
            yield
            return
        with self._linear.add_in_place():
            yield

    @torch.no_grad()
    def _probe_model(self, model: Any, decoder: Any) -> float:
        """Note what the model returns for a few tokens; return the largest difference, in nats, between the head's
        log-probs and those of the model's forward.
        """
        tokens_1T = torch.arange(LOOK, device=model.device)[None]
        theirs_TV = torch.log_softmax(model(input_ids=tokens_1T, use_cache=False).logits[0].float(), -1)
        self.vocabulary = theirs_TV.shape[-1]
        output = decoder(input_ids=tokens_1T, use_cache=False)
        self._kind: type[Any] = type(output)
        ours_TV = torch.log_softmax(self(output.last_hidden_state[0]).float(), -1)
        return measure_distance(ours_TV, theirs_TV)


def measure_distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between two results; infinity if an element is NaN in only one of them."""
    same = (one == other) | (one.isnan() & other.isnan())  # broken weights give NaN on both sides
    return float(torch.where(same, 0.0, (one - other).abs()).nan_to_num(math.inf, math.inf).max())


def _replace_module(model: Any, module: nn.Module, other: nn.Module) -> Any:
    """Return a copy of the model with `other` in the place of `module`; the copy shares all other parts."""
    path = next(name for name, found in model.named_modules() if found is module)
    if not path:
        raise TypeError("the decoder is the model itself")
    top = made = _copy_module(model)
    *outer, last = path.split(".")
    for name in outer:
        made._modules[name] = _copy_module(made._modules[name])
        made = made._modules[name]
    made._modules[last] = other
    return top


def _replace_last_layer(head: Any, last: nn.Module | None) -> AddingLinear | None:
    """Replace the last layer by an `AddingLinear`, and return the `AddingLinear`.

    If the last layer has more than a weight, or is not a direct child of the model, change nothing and return None.
    """
    name = next((name for name, found in head._modules.items() if found is last), None)
    if name is None or type(last) is not nn.Linear or last.bias is not None:
        return None
    head._modules[name] = made = AddingLinear(last)
    return made


def _copy_module(module: nn.Module) -> Any:
    """Return a shallow copy of a module: it shares tensors and child modules, but has lists of hooks of its own."""
    made = copy.copy(module)
    held = {name: copy.copy(value) for name, value in vars(module).items() if "hooks" in name}
    vars(made).update(held, _modules=dict(module._modules))
    return made


def _refusal(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"policy.path: the output layer of a {type(model).__name__} cannot be run on its own "
        f"({why.splitlines()[0]}); choose another architecture"
    )
