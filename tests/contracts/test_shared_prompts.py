"""Responses that share a prompt have the log-probs and gradients of separate rows, on each architecture that shares."""

from __future__ import annotations

import pytest
import torch

from rollflow.storage.batch import TrajectoryBatch
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch_of, trajectory
from tests.contracts.test_token_logprobs import ARCHITECTURES, learner_of, model_of, tokens_of

WINDOWED = {"mistral", "gemma2", "gemma3_text", "cohere2"}  # architectures whose config declares sliding windows


def groups() -> TrajectoryBatch:
    """Return two groups of three responses; the responses have different lengths."""
    prompts = [tokens_of(7, 50 + group) for group in range(2)]
    return batch_of(
        *(
            [trajectory(prompt, tokens_of(2 + i, group + 9 * i), i, reward=float(i == 1)) for i in range(3)]
            for group, prompt in enumerate(prompts)
        )
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shared_prompts_give_the_results_of_separate_rows(name: str) -> None:
    made = learner_of(model_of(name), max_grad_norm=1e9)
    assert (made.width is None) == (name in WINDOWED)
    if made.width is None:
        return
    data, found = BatchRows.of(groups()), []
    for width in (made.width, None):
        made.width = width
        lines = [len(micro.tokens) for micro in made.micros(data, range(6))]
        assert lines == [6 if width is None else 2]
        made.policy.clear()
        logp = [made.own_logprobs(micro)[micro.among.argsort()] for micro in made.micros(data, range(6))]
        (torch.cat(logp) * torch.arange(1.0, 1 + len(data.chosen))).sum().backward()
        grads = [p.grad.flatten() for p in made.model.parameters() if p.grad is not None]
        found.append((torch.cat(logp).detach(), torch.cat(grads)))
    for together, alone in zip(*found, strict=True):
        assert float((together - alone).norm() / alone.norm()) < 1e-4


@pytest.mark.parametrize("unheard", ["attention_mask", "position_ids"])
def test_model_that_ignores_mask_or_positions_is_refused(unheard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mask, the second response attends to the first response.

    Without positions, the second response has positions that follow the first response instead of the prompt.
    """
    model = model_of("llama")
    forward = model.model.forward

    def deaf(*given: object, **others: object) -> object:
        return forward(*given, **{name: value for name, value in others.items() if name != unheard})

    monkeypatch.setattr(model.model, "forward", deaf)
    assert learner_of(model).width is None
