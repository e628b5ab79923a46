"""The language-model head of a policy, which computes logits from hidden states with the model's own code.

    hidden states --> the model's own forward --> logits
                      (hidden states replace the decoder's output)

Some models compute more than a matrix product, such as a soft-cap (Gemma 2), a scale (Granite, Cohere) or a bias, so
`LMHead` runs the model's own forward pass. A model that cannot be run in this way is rejected at the start of a run.

In shapes, M is the number of positions, T the number of tokens, H the hidden size, and V the size of the vocabulary.
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

LOOK = 8  # number of tokens with which a model's head is tested
NEAR = {torch.float32: 1e-3}  # data type -> largest accepted difference of log-probs, in nats
HALF = 0.05  # largest accepted difference of log-probs, in nats, for data types not in `NEAR`


class _FixedDecoder(nn.Module):
    """A module that replaces a model's decoder, and always returns the given output."""

    output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return `output`, whatever the arguments are."""
        return self.output


class LMHead:
    """The language-model head of a model, which shares the model's parameters."""

    vocabulary: int  # number of logits per token

    def __init__(self, model: Any, *, judged: bool = True) -> None:
        """Find the language-model head of `model`, and test the head with a few tokens.

        With `judged`, the head's log-probs are compared with those of the model's own forward pass; `judged` must be
        False for a model without weights.

        Raises:
            ConfigError: the decoder and the head of the model cannot be run separately. With `judged`, the error is
            also raised if the head's log-probs differ from those of the model's forward pass.
        """
        self._given = _FixedDecoder()
        try:
            decoder = model.get_decoder()
            self._head = _replace_module(model, decoder, self._given)
            self._linear = _replace_last_layer(self._head, model.get_output_embeddings())
            off = self._probe_model(model, decoder)
        except torch.OutOfMemoryError:
            raise  # running out of memory does not mean that the model is unsuitable
        except Exception as error:  # the model's code may raise any error here
            raise _refusal(model, f"{type(error).__name__}: {error}") from error
        if judged and off > NEAR.get(model.dtype, HALF):
            raise _refusal(model, f"its log-probs differ from those of the whole model by {off:.2g} nats")

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        """Return logits of shape (M, V), in the model's data type, from hidden states of shape (M, H)."""
        stand_in_1M = torch.zeros((1, len(hidden_MH)), dtype=torch.long, device=hidden_MH.device)
        self._given.output = self._kind(last_hidden_state=hidden_MH[None])
        try:
            return cast(Tensor, self._head(input_ids=stand_in_1M, use_cache=False).logits.squeeze(0))
        finally:
            self._given.output = None

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Let backward passes in a `with` block add the last layer's gradient in place.

        A small last layer, or one with a bias, uses autograd as usual.
        """
        if self._linear is None or not self._linear.gains:
            yield
            return
        with self._linear.add_in_place():
            yield

    @torch.no_grad()
    def _probe_model(self, model: Any, decoder: Any) -> float:
        """Record the type and the width of the model's output; return the largest difference, in nats, between
        log-probs of the head and of the whole model.
        """
        tokens_1T = torch.arange(LOOK, device=model.device)[None]
        theirs_TV = torch.log_softmax(model(input_ids=tokens_1T, use_cache=False).logits[0].float(), -1)
        self.vocabulary = theirs_TV.shape[-1]
        output = decoder(input_ids=tokens_1T, use_cache=False)
        self._kind: type[Any] = type(output)
        ours_TV = torch.log_softmax(self(output.last_hidden_state[0]).float(), -1)
        return measure_distance(ours_TV, theirs_TV)


def measure_distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between two tensors; infinity if an element is NaN in only one of them."""
    # A NaN in both tensors counts as equal, because NaN weights make both tensors NaN.
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, 0.0, (one - other).abs()).nan_to_num(math.inf, math.inf).max())


def _replace_module(model: Any, module: nn.Module, other: nn.Module) -> Any:
    """Return a copy of a model in which `other` replaces `module`; all other modules are shared."""
    path = next(name for name, found in model.named_modules() if found is module)
    if not path:
        raise TypeError("the model has no output layer (head), because its decoder is the model itself")
    top = made = _copy_module(model)
    *outer, last = path.split(".")
    for name in outer:
        made._modules[name] = _copy_module(made._modules[name])
        made = made._modules[name]
    made._modules[last] = other
    return top


def _replace_last_layer(head: Any, last: nn.Module | None) -> AddingLinear | None:
    """Replace a model's last layer by an `AddingLinear`; return the new layer, or None if it cannot be replaced.

    A layer that has a bias or is not a direct child of the model stays unchanged.
    """
    name = next((name for name, found in head._modules.items() if found is last), None)
    if name is None or type(last) is not nn.Linear or last.bias is not None:
        return None
    head._modules[name] = made = AddingLinear(last)
    return made


def _copy_module(module: nn.Module) -> Any:
    """Return a shallow copy of a module, which shares tensors and child modules, but not the lists of hooks."""
    made = copy.copy(module)
    held = {name: copy.copy(value) for name, value in vars(module).items() if "hooks" in name}
    vars(made).update(held, _modules=dict(module._modules))
    return made


def _refusal(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"policy.path: the output layer of a {type(model).__name__} cannot be run on its own "
        f"({why.splitlines()[0]}); choose another architecture"
    )
