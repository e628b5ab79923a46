"""Tests that rows with shared tokens get the log-probs and gradients of separate rows, on each model architecture that
supports sharing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollflow.storage.batch import TrajectoryBatch
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch_of, trajectory
from tests.contracts.test_token_logprobs import ARCHITECTURES, OTHERS, learner_of, model_of, tokens_of

ALONE = {"mistral", "gemma2", "gemma3_text", "cohere2", "mamba"}  # architectures with windows or a recurrent state


def groups() -> TrajectoryBatch:
    """Return two groups of three responses, which share their prompts; the responses have different lengths."""
    prompts = [tokens_of(7, 50 + group) for group in range(2)]
    return batch_of(
        *(
            [trajectory(prompt, tokens_of(2 + i, group + 9 * i), i, reward=float(i == 1)) for i in range(3)]
            for group, prompt in enumerate(prompts)
        )
    )


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS])
def test_shared_tokens_give_the_results_of_separate_rows(name: str) -> None:
    made = learner_of(model_of(name), max_grad_norm=1e9)
    assert (made.sharing is None) == (name in ALONE)
    if made.sharing is None:
        return
    assert made.sharing.by_path
    data, found = BatchRows.of(groups()), []
    for sharing in (None, replace(made.sharing, dense=4), replace(made.sharing, by_path=False)):
        made.sharing = sharing
        shapes = [tuple(micro.tokens.shape) for micro in made.micros(data, range(6))]
        assert shapes == [(6, 11) if sharing is None else (1, 32) if sharing.by_path else (2, 16)]
        made.policy.clear()
        logp = [made.own_logprobs(micro)[micro.among.argsort()] for micro in made.micros(data, range(6))]
        (torch.cat(logp) * torch.arange(1.0, 1 + len(data.chosen))).sum().backward()
        grads = [p.grad.flatten() for p in made.model.parameters() if p.grad is not None]
        found.append((torch.cat(logp).detach(), torch.cat(grads)))
    for alone, *together in zip(*found, strict=True):
        assert all(float((one - alone).norm() / alone.norm()) < 1e-4 for one in together)


@pytest.mark.parametrize("unheard", [{"attention_mask", "prefix_blocks"}, {"position_ids"}])
def test_model_that_ignores_mask_or_positions_is_refused(unheard: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mask, a response attends to the response before it.

    Without the positions, those of the second response would follow the first response instead of the prompt.
    """
    model = model_of("llama")
    forward = model.model.forward

    def deaf(*given: object, **others: object) -> object:
        return forward(*given, **{name: value for name, value in others.items() if name not in unheard})

    monkeypatch.setattr(model.model, "forward", deaf)
    assert learner_of(model).sharing is None


def test_model_that_ignores_blocks_gets_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *given, prefix_blocks=None, **others: forward(*given, **others))
    sharing = learner_of(model).sharing
    assert sharing is not None
    assert not sharing.by_path


@pytest.mark.parametrize(("value", "prefixes"), [("all", True), ("prompts", False), ("none", None)])
def test_config_key_selects_which_tokens_are_shared(value: str, prefixes: bool | None) -> None:
    made = learner_of(model_of("llama"), share_prefixes=value)
    assert (made.sharing and made.sharing.prefixes) == prefixes
    assert made.model.config._attn_implementation == ("rollflow_paths" if prefixes else "sdpa")
