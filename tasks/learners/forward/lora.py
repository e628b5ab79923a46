"""Implements LoRA: a small adapter beside each linear layer is trained, and the policy's own weights stay fixed.

    y = W x + (alpha / rank) B A x        W (out, in) is fixed; A (rank, in) and B (out, rank) are trained

(Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, section 4.1.)

- Only the adapter is trained and has AdamW moments.
- A new adapter does not change the policy, because A starts with random values and B with zeros.
- The published weights are W + (alpha / rank) B A, rounded to the policy's data type and named like the policy's
  weights, so that readers need not know about adapters.
- The adapter is part of the learner's state; the fixed weights W are read from the run's first weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rollflow.storage.errors import ConfigError
from rollflow.tasks.learners.checkpoint.shards import Named
from rollflow.tasks.learners.config import Lora, TrainBase
from rollflow.tasks.learners.forward.reference import Reference, named_tensors
from rollflow.tasks.learners.forward.token_logprobs import TokenLogprobs
from rollflow.tasks.learners.forward.trained_policy import TrainedPolicy

log = logging.getLogger(__name__)

NAME = "default"  # peft's name of the adapter
ADAPTER = "adapter/"  # prefix of the names of the LoRA adapter's tensors in the learner state


class LoraPolicy(TrainedPolicy):
    """A policy with a LoRA adapter. Only the adapter is trained. `first` returns the weights with which the run began,
    by Hugging Face name."""

    def __init__(self, model: Any, config: TrainBase, first: Callable[[], Mapping[str, Tensor]]) -> None:
        assert config.lora is not None
        self._first, self._warned = first, False
        kind = torch.float32 if config.master_dtype == "float32" else model.dtype
        self._layers = _add_adapters(model, config.lora, kind)
        self._scale = config.lora.alpha / config.lora.rank
        super().__init__(model, config, dict(_list_parameters(self._layers)))
        self.model.requires_grad_(True)
        self._switch(False)
        self.begun = False

    def begin(self, rate: float) -> None:
        """Prepare the update of a policy version: freeze the policy's own weights and enable the LoRA adapter."""
        self._begin()
        super().begin(rate)

    def reference(self, every: int, token_logprobs: TokenLogprobs) -> Reference:
        """See `TrainedPolicy`."""
        return AdapterReference(self, every, token_logprobs)

    @contextmanager
    def use_published(self) -> Iterator[None]:
        """See `TrainedPolicy`. During the block the adapter is off, and the weights include the adapter's part."""
        if not self.begun:
            yield
            return
        bases = [layer.get_base_layer().weight for layer in self._layers.values()]
        sums = [self._sum(base, layer) for base, layer in zip(bases, self._layers.values(), strict=True)]
        self._warn_of_rounding(bases, sums)
        self._switch(False)
        try:
            with swap_values(zip(bases, sums, strict=True)):
                yield
        finally:
            self._switch(True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the LoRA adapter, and AdamW's state of these tensors."""
        return {**self._adapter(), **super().tensors()}

    def expected_tensors(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """See `TrainedTensors`."""
        return {**self._adapter(), **super().expected_tensors(name for name in saved if not name.startswith(ADAPTER))}

    @torch.no_grad()
    def load(self, given: Named) -> None:
        """See `TrainedTensors`; the model must already have the weights that were published with this state.

        The fixed weight W is set to the run's first weight if the first weight and the adapter give the published
        weight. If they do not (another kind of machine published the weight), W is set to the published weight minus
        the adapter's part, because the published files define a policy version. Weights that are published later then
        include the difference between these two values of W.
        """
        super().load(self._without_adapter(given))
        self._begin()
        self._find_base()

    def _without_adapter(self, saved: Named) -> Iterator[tuple[str, Tensor]]:
        """Load the tensors of the LoRA adapter from `saved`; yield all other tensors of `saved`."""
        own = self._adapter()
        for name, tensor in saved:
            if name in own:
                own[name].copy_(tensor)
            else:
                yield name, tensor
            del tensor  # free the file's memory before the next file is read

    def _find_base(self) -> None:
        first = self._first()
        for name, layer in self._layers.items():
            weight = layer.get_base_layer().weight
            left = (weight.float() - self._part(layer)).to(weight.dtype)
            base = first.get(f"{name}.weight", left).to(weight)
            weight.copy_(torch.where(self._sum(base, layer) == weight, base, left))

    def _begin(self) -> None:
        self.model.requires_grad_(False)
        self._switch(True)
        self.begun = True

    def _adapter(self) -> dict[str, Tensor]:
        return {f"{ADAPTER}{name}": parameter.detach() for name, parameter in self.trained.parameters.items()}

    def _switch(self, on: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(on)

    @torch.no_grad()
    def _sum(self, base: Tensor, layer: Any) -> Tensor:
        """Return the published weight of a layer: `base` plus the product of the adapter's matrices.

        Where the product is zero, `base` stays unchanged, because adding zero would turn -0 into +0.
        """
        part = self._part(layer)
        return torch.where(part == 0, base, (base.float() + part).to(base.dtype))

    @torch.no_grad()
    def _warn_of_rounding(self, bases: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Log once how much rounding changes the published weights, relative to the change by the LoRA adapter."""
        if self._warned or self.model.dtype == torch.float32:
            return
        added = lost = 0.0
        for base, published, layer in zip(bases, sums, self._layers.values(), strict=True):
            part = self._part(layer)
            added += float(part.square().sum(dtype=torch.float64))
            lost += float((published.float() - (base.float() + part)).square().sum(dtype=torch.float64))
        if added:
            self._warned = True
            share = 100 * math.sqrt(lost / added)
            log.warning(
                "policy.dtype = 'bfloat16' with [train.lora]: rounding changes the published weights by %.0f%% "
                "(root mean square) of what the adapter adds to them; the adapter's own weights are not "
                "rounded, so later versions lose nothing. policy.dtype = 'float32' avoids the rounding",
                share,
            )

    def _part(self, layer: Any) -> Tensor:
        """Return the matrix that the LoRA adapter adds to a layer's weight, in float32 with shape (out, in)."""
        found: Tensor = self._scale * (layer.lora_B[NAME].weight.float() @ layer.lora_A[NAME].weight.float())
        return found

    def _model_tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors by the names that they had before the LoRA adapter was added."""
        named = named_tensors(self.model)
        return {name.replace(".base_layer.", "."): t for name, t in named.items() if ".lora_" not in name}


class AdapterReference(Reference):
    """A reference policy that consists of a LoRA adapter and uses the model of the trained policy.

    While the reference policy computes log-probs, its adapter replaces the trained adapter. The adapter of the
    reference policy starts at zero, which is the policy without an adapter.
    """

    def __init__(self, policy: LoraPolicy, every: int, token_logprobs: TokenLogprobs) -> None:
        self._parameters, self._every, self._own_pass = policy.trained.parameters, every, token_logprobs
        self._adapter = {name: torch.zeros_like(p, requires_grad=False) for name, p in self._parameters.items()}
        self.token_logprobs, self.now = self._pass, self._of_policy
        self.version = -1

    def _pass(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        with swap_values((parameter, self._adapter[name]) for name, parameter in self._parameters.items()):
            return self._own_pass(*given, **options)

    def _of_policy(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _tensors_to_save(self) -> dict[str, Tensor]:
        return self._adapter


@contextmanager
def swap_values(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Give each parameter the values of its paired tensor during a `with` block."""
    own = [(parameter, parameter.data, other) for parameter, other in pairs]
    try:
        for parameter, _, other in own:
            parameter.data = other
        yield
    finally:
        for parameter, data, _ in own:
            parameter.data = data


def _add_adapters(model: Any, config: Lora, kind: torch.dtype) -> dict[str, Any]:
    """Add LoRA adapters to the model's decoder; return the adapted layers by their names in the model.

    Raises:
        ConfigError: a name in `train.lora.targets` matches no linear layer.
    """
    decoder = model.get_decoder()
    chosen = _choose_layers([name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)], config)
    held = nn.Module()  # a module without the model's config, because peft would choose other layers by the config
    held.decoder = decoder
    inject_adapter_in_model(LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=chosen), held)
    found = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for layer in found.values():
        layer.lora_A.to(kind)
        layer.lora_B.to(kind)
    return found


def _choose_layers(linear: Sequence[str], config: Lora) -> list[str]:
    """Return the names of the decoder's linear layers that get a LoRA adapter."""
    targets = config.targets or linear
    chosen = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    if lost := [target for target in targets if not chosen[target]] or ([] if linear else ["all"]):
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise ConfigError(
            f"train.lora.targets contains {lost}, but the policy's decoder has no linear layer of this name; "
            f"choose among these layers: {known}"
        )
    return sorted({name for names in chosen.values() for name in names})


def _list_parameters(layers: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the adapters by their names in files of the peft library, without the prefix
    "base_model.model."."""
    for name, layer in layers.items():
        yield f"{name}.lora_A.weight", layer.lora_A[NAME].weight
        yield f"{name}.lora_B.weight", layer.lora_B[NAME].weight
