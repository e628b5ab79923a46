"""A policy's own head: from its decoder's hidden states to logits by the model's own forward.

    hidden states --> the model's own forward --> logits
                      (they are put in the place of what its decoder gives)

What a model does between hidden states and logits stands in its forward: a soft-cap (Gemma 2), a scale (Granite,
Cohere), a bias. So that forward is run, and nothing of it is written again here. Training, the probe, the transformers
engine and the cold start all come this way. A model that cannot be run so is refused at the start.

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

LOOK = 8  # tokens that a model is tried with
NEAR = {torch.float32: 1e-3}  # nats by which two ways to the same log-probs may differ; HALF in shorter types
HALF = 0.05


class _Given(nn.Module):
    """Stands where a model has its decoder, and returns what it is given."""

    output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """What stands in `output`, whatever is asked."""
        return self.output


class OwnHead:
    """The head of `model`, whose parameters it reads where they are. See the module's docstring."""

    vocabulary: int  # V

    def __init__(self, model: Any, *, judged: bool = True) -> None:
        """Tries the model with a few tokens; what comes out is `judged`, unless its weights are not there yet.

        Raises:
            ConfigError: its log-probs come out otherwise than its own forward gives them.
        """
        self._given = _Given()
        try:
            decoder = model.get_decoder()
            self._head = _with_module(model, decoder, self._given)
            self._linear = _adding(self._head, model.get_output_embeddings())
            off = self._distance(model, decoder)
        except torch.OutOfMemoryError:
            raise  # it says nothing of the model's code
        except Exception as error:  # whatever a model's own code says of being run so
            raise _refused(model, f"{type(error).__name__}: {error}") from error
        if judged and off > NEAR.get(model.dtype, HALF):
            raise _refused(model, f"log-probs differ by {off:.2g} nats")

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        """Logits (M, V), in the model's type; for its forward the M hidden states are those of one row."""
        stand_in_1M = torch.zeros((1, len(hidden_MH)), dtype=torch.long, device=hidden_MH.device)
        self._given.output = self._kind(last_hidden_state=hidden_MH[None])
        try:
            return cast(Tensor, self._head(input_ids=stand_in_1M, use_cache=False).logits.squeeze(0))
        finally:
            self._given.output = None

    @contextmanager
    def adding(self) -> Iterator[None]:
        """For the length of a block, a backward pass adds the gradient of the last layer's weight where it is, without
        autograd: see `AddingLinear`. Where that layer is small, or not only a weight, nothing is different."""
        if self._linear is None or not self._linear.gains:
            yield
            return
        with self._linear.adding():
            yield

    @torch.no_grad()
    def _distance(self, model: Any, decoder: Any) -> float:
        """The most that this way and the model's own differ in, in nats."""
        tokens_1T = torch.arange(LOOK, device=model.device)[None]
        theirs_TV = torch.log_softmax(model(input_ids=tokens_1T, use_cache=False).logits[0].float(), -1)
        self.vocabulary = theirs_TV.shape[-1]
        output = decoder(input_ids=tokens_1T, use_cache=False)
        self._kind: type[Any] = type(output)
        ours_TV = torch.log_softmax(self(output.last_hidden_state[0]).float(), -1)
        return distance(ours_TV, theirs_TV)


def distance(one: Tensor, other: Tensor) -> float:
    """The most that two ways to the same numbers differ in; infinite where only one of them gives a number."""
    same = (one == other) | (one.isnan() & other.isnan())  # of broken weights, both are NaN
    return float(torch.where(same, 0.0, (one - other).abs()).nan_to_num(math.inf, math.inf).max())


def _with_module(model: Any, module: nn.Module, other: nn.Module) -> Any:
    """The model with `other` in the place of `module`; it shares everything else with the one that is given."""
    path = next(name for name, found in model.named_modules() if found is module)
    if not path:
        raise TypeError("the decoder is the model itself")
    top = made = _shallow(model)
    *outer, last = path.split(".")
    for name in outer:
        made._modules[name] = _shallow(made._modules[name])
        made = made._modules[name]
    made._modules[last] = other
    return top


def _adding(head: Any, last: nn.Module | None) -> AddingLinear | None:
    """Put an `AddingLinear` in the place of the last layer, if it is a weight that stands in the model itself."""
    name = next((name for name, found in head._modules.items() if found is last), None)
    if name is None or type(last) is not nn.Linear or last.bias is not None:
        return None
    head._modules[name] = made = AddingLinear(last)
    return made


def _shallow(module: nn.Module) -> Any:
    """A module with the same tensors and the same modules in it. Hooks that the other gets later are not its own."""
    made = copy.copy(module)
    held = {name: copy.copy(value) for name, value in vars(module).items() if "hooks" in name}
    vars(made).update(held, _modules=dict(module._modules))
    return made


def _refused(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"policy.path: the head of a {type(model).__name__} cannot be run on its own ({why.splitlines()[0]}); choose "
        "another architecture"
    )
