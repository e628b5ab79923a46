"""Log-probs of a policy's tokens, through the model's own head.

    tokens --> decoder --> hidden states at the positions asked for --> the model's own forward --> log-probs
                                                           (they are put in the place of what its decoder gives)

What a model does between hidden states and logits stands in its forward: a soft-cap (Gemma 2), a scale (Granite,
Cohere), a bias. So that forward is run, and nothing of it is written again here. Training, the pass before a version's
first update and the probe all come this way. A model that cannot be run so is refused at the start.

Logits are made for a chunk of tokens at a time: all of a batch of 16,384 tokens would be 10 GB at a vocabulary of
151,936, several times over. A learner asks for parts of `whole_rows`, and goes backward through each before the next. A
longer row's logits are made again in the backward pass.

Shapes: R rows, T padded tokens, M positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollflow.storage.errors import ConfigError

LOGITS_BYTES = 2**27  # of one chunk's logits in float32; a pass has about five such tensors at once
LOOK = 8  # tokens that a model is tried with
NEAR = {torch.float32: 1e-3}  # nats by which two ways to the same log-probs may differ; HALF in shorter types
HALF = 0.05


class _Given(nn.Module):
    """Stands where a model has its decoder, and returns what it is given."""

    output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """What stands in `output`, whatever is asked."""
        return self.output


class TokenLogprobs:
    """Log-probs of tokens under `model`, whose parameters it reads where they are. See the module's docstring."""

    def __init__(self, model: Any) -> None:
        """Tries the model with a few tokens.

        Raises:
            ConfigError: its log-probs come out otherwise than its own forward gives them.
        """
        self._decoder, self._given = model.get_decoder(), _Given()
        self._kind: type[Any] = dict
        try:
            self._head = _with_module(model, self._decoder, self._given)
            off = self._distance(model)
        except Exception as error:  # whatever a model's own code says of being run so
            raise _refused(model, f"{type(error).__name__}: {error}") from error
        if off > NEAR.get(model.dtype, HALF):
            raise _refused(model, f"log-probs differ by {off:.2g} nats")

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        where: tuple[Tensor, Tensor],
        targets_M: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (M,) of `targets_M`, in nats, at `temperature`; with `entropy`, that of what they were chosen from.

        `inputs` are the decoder's: (R, T) `input_ids`, and what else it takes. `where` is (row, position) of the M
        tokens that come before them.
        """
        return self.of(self.hidden(inputs, where), targets_M, temperature=temperature, entropy=entropy)

    def hidden(self, inputs: Mapping[str, Tensor], where: tuple[Tensor, Tensor]) -> Tensor:
        """(M, H) what the decoder gives for the tokens before."""
        return self._hidden(inputs)[where]

    def of(
        self, hidden_MH: Tensor, targets_M: Tensor, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (M,), and entropies with `entropy`, from hidden states; logits are made anew in the backward pass
        where they would be more than a chunk."""
        parts = max(1, math.ceil(len(targets_M) / self._chunk))
        if parts == 1:
            return self._chosen(hidden_MH, targets_M, temperature, entropy)
        chunks = zip(hidden_MH.tensor_split(parts), targets_M.tensor_split(parts), strict=True)
        logps, entropies = zip(*(self._chosen_again(*chunk, temperature, entropy) for chunk in chunks), strict=True)
        return torch.cat(logps), torch.cat(entropies) if entropy else None

    def whole_rows(self, row_M: Tensor) -> list[slice]:
        """The M tokens in parts of whole rows, each of no more than a chunk where no row is more."""
        ends = [*(row_M.diff().nonzero().squeeze(1) + 1).tolist(), len(row_M)]
        found, begin = list[slice](), 0
        for end, after in zip(ends, [*ends[1:], math.inf], strict=True):
            if after - begin > self._chunk and end > begin:
                found.append(slice(begin, end))
                begin = end
        return found

    @property
    def _chunk(self) -> int:
        """Tokens whose logits are made at a time."""
        return max(1, LOGITS_BYTES // (4 * self._vocabulary))

    def _hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        output = self._decoder(**inputs, use_cache=False)
        self._kind = type(output)
        return cast(Tensor, output.last_hidden_state)

    def _logits(self, hidden_MH: Tensor) -> Tensor:
        """(M, V) by the model's forward, for which the M hidden states are those of one row."""
        stand_in_1M = torch.zeros((1, len(hidden_MH)), dtype=torch.long, device=hidden_MH.device)
        self._given.output = self._kind(last_hidden_state=hidden_MH[None])
        try:
            return cast(Tensor, self._head(input_ids=stand_in_1M, use_cache=False).logits.squeeze(0))
        finally:
            self._given.output = None

    def _chosen(
        self, hidden_MH: Tensor, targets_M: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits_MV = self._logits(hidden_MH).float()
        if temperature != 1.0:  # a copy of them all, that changes nothing
            logits_MV = logits_MV / temperature
        logp_MV = torch.log_softmax(logits_MV, -1)
        entropy_M = -(logp_MV.exp() * logp_MV).sum(-1) if entropy else None
        return logp_MV.gather(1, targets_M[:, None]).squeeze(1), entropy_M

    def _chosen_again(
        self, hidden_MH: Tensor, targets_M: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`_chosen`, of which nothing is kept for the backward pass: there it is computed once more."""
        found = checkpoint(
            self._chosen,
            *(hidden_MH, targets_M, temperature, entropy),
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn
        )
        return cast(tuple[Tensor, Tensor | None], found)

    @torch.no_grad()
    def _distance(self, model: Any) -> float:
        """The most that this way and the model's own differ in, in nats."""
        tokens_1T = torch.arange(LOOK, device=model.device)[None]
        theirs_TV = torch.log_softmax(model(input_ids=tokens_1T, use_cache=False).logits[0].float(), -1)
        self._vocabulary = theirs_TV.shape[-1]
        ours_TV = torch.log_softmax(self._logits(self._hidden({"input_ids": tokens_1T})[0]).float(), -1)
        return float((ours_TV - theirs_TV).abs().nan_to_num(0.0).max())  # of broken weights, both are NaN


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


def _shallow(module: nn.Module) -> Any:
    """A module with the same tensors and the same modules in it."""
    made = copy.copy(module)
    made.__dict__["_modules"] = dict(module._modules)
    return made


def _refused(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"policy.path: the head of a {type(model).__name__} cannot be run on its own ({why.splitlines()[0]}); choose "
        "another architecture"
    )
