"""Cold start: trains a small new policy on demonstrations until it answers some, but not all, questions correctly.

The loss includes only the tokens that the policy itself should write. The accuracy of the policy is measured on
held-out questions, as in the run's evaluations. The supervised training ends when a measured accuracy reaches the
target. After the training, a bisection between the weights at the last two measurements finds weights with about the
target accuracy.

With several domains (kinds of task), the target is for the mean accuracy of the domains. Domains whose accuracy is
further below the target get more demonstrations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.demonstrations import Demonstration, DemonstrationPool
from rollflow.tasks.policies.head import LMHead

WARMUP = 50  # number of steps over which the learning rate rises
CLOSE = 0.005  # largest accepted difference between the accuracy and the target accuracy
LOOKS = 8  # largest number of accuracy measurements in the bisection


@dataclass(frozen=True, slots=True)
class HeldOutAccuracy:
    """The accuracy on held-out prompts: of each domain, and their mean weighted by the shares of the domains."""

    mean: float
    domains: Mapping[str, float]

    @classmethod
    def of(cls, domains: Mapping[str, Sequence[bool]], shares: Mapping[str, float]) -> HeldOutAccuracy:
        """Compute the accuracies from the results of all responses (right or wrong). Without shares, all responses have
        equal weight.
        """
        found = {domain: sum(right) / len(right) for domain, right in domains.items()}
        if not shares:
            return cls(sum(map(sum, domains.values())) / sum(map(len, domains.values())), found)
        total = math.fsum(shares[domain] for domain in found)
        return cls(math.fsum(shares[domain] * one for domain, one in found.items()) / total, found)


Measure = Callable[[Any], HeldOutAccuracy]


def cold_start(
    model: Any, config: ColdStart, pool: DemonstrationPool, accuracy: Measure, report: Callable[[int, float], None]
) -> float:
    """Train `model` in place on demonstrations; return the mean accuracy that it reached.

    `report(step, accuracy)` is called at each measurement of the accuracy.

    Raises:
        ConfigError: the model did not reach the target accuracy within `max_steps` steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    decoder, head, found, before = model.get_decoder(), LMHead(model), 0.0, _copy_weights(model)
    for step in range(1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, step / WARMUP)
        loss = answer_loss(decoder, head, pool.draw(config.batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % config.evaluate_every == 0:
            measured = accuracy(model)
            found = measured.mean
            report(step, found)
            if found >= config.target_accuracy:
                return _approach_target(model, before, found, config.target_accuracy, accuracy, partial(report, step))
            before = _copy_weights(model)
            pool.weigh(measured.domains, config.target_accuracy)
    raise ConfigError(
        f"policy.cold_start.target_accuracy = {config.target_accuracy}: the policy reached a held-out "
        f"accuracy of only {found:.2f} in {config.max_steps} steps; raise policy.cold_start.max_steps, "
        "or choose easier prompts"
    )


def _copy_weights(model: Any) -> list[Tensor]:
    """Copy the model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def _approach_target(
    model: Any,
    before: Sequence[Tensor],
    found: float,
    target: float,
    accuracy: Measure,
    report: Callable[[float], None],
) -> float:
    """Move the weights towards the weights `before` until the accuracy has fallen to about `target`; return the
    accuracy.

    `found` is the accuracy of the model before the call.
    """
    after, low, high = _copy_weights(model), 0.0, 1.0  # interpolation: 0 is `before`, 1 is `after`
    for _ in range(LOOKS):
        if found - target <= CLOSE:
            break
        middle = (low + high) / 2
        _blend(model, before, after, middle)
        seen = accuracy(model).mean
        report(seen)
        if seen >= target:
            found, high = seen, middle
        else:
            low = middle
    _blend(model, before, after, high)
    return found


def _blend(model: Any, before: Sequence[Tensor], after: Sequence[Tensor], share: float) -> None:
    """Set the weights to a linear interpolation between `before` (`share` = 0) and `after` (`share` = 1)."""
    for parameter, first, last in zip(model.parameters(), before, after, strict=True):
        parameter.copy_(torch.lerp(first, last, share))


def answer_loss(decoder: Any, head: LMHead, shown: Sequence[Demonstration]) -> Tensor:
    """Return the mean cross-entropy, in nats, of the trained tokens of demonstrations."""
    longest = max(len(one.prompt) + len(one.response) for one in shown)
    tokens = torch.zeros((len(shown), longest), dtype=torch.long)
    mask = torch.zeros((len(shown), longest), dtype=torch.bool)
    for i, (prompt, answer, sampled) in enumerate(shown):
        end = len(prompt) + len(answer)
        tokens[i, :end] = torch.tensor([*prompt, *answer])
        mask[i, len(prompt) : end] = torch.tensor(sampled) if sampled else True
    row, position = mask.nonzero(as_tuple=True)
    hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    return torch.nn.functional.cross_entropy(head(hidden[row, position - 1]).float(), tokens[row, position])


@torch.no_grad()
def generate_answers(
    model: Any, prompts: Sequence[Sequence[int]], end: int, longest: int, temperature: float, seed: int
) -> list[list[int]]:
    """Generate an answer for each prompt; return the tokens of the answers without the end token.

    With temperature 0, the most probable token is always chosen. Prompts of equal length run in one batch.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(p) for p in prompts}):
        rows = [i for i, p in enumerate(prompts) if len(p) == length]
        tokens, past = torch.tensor([list(prompts[i]) for i in rows]), None
        ended = torch.zeros(len(rows), dtype=torch.bool)
        for _ in range(longest):
            output = model(input_ids=tokens, past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[:, -1].float()
            tokens = _choose(logits, temperature, generator)
            ended |= tokens[:, 0] == end
            for i, token, over in zip(rows, tokens[:, 0].tolist(), ended.tolist(), strict=True):
                if not over:
                    found[i].append(token)
            if bool(ended.all()):
                break
    return found


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Sample the next token of each sequence in the batch; return a tensor of shape (sequences, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
