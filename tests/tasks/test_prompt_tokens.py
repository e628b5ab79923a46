"""The tokens of a prompt: start token, context, chat template and its clock, in new runs and in recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, processors

from rollflow.flows.preflight import preflight
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import RunCreated
from rollflow.storage.model_input import ModelInput
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.fixed_shape import FixedShapeSampler
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.policies.validation import name_end_tokens
from rollflow.tasks.run.expectations import expected_of
from tests.support.policy_folders import CHAT, CONTEXT, OVER, change_json, make_folder, recipe_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))


def test_prompt_starts_with_the_start_token_in_any_alphabet(tmp_path: Path) -> None:
    vocabulary = {letter: id for id, letter in enumerate("0123456789+=")} | {"<s>": 12}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 12)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "eos_token_id": 0}')
    assert PolicyTokenizer(tmp_path).encode("1+2=") == [12, 1, 10, 2, 11]


def test_recorded_runs_keep_their_context_length(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    change_json(folder / "config.json", rope_parameters=scaling, original_max_position_embeddings=64)
    assert PolicyTokenizer(folder).context == 64
    recorded = PolicyTokenizer(folder, single_start=False)
    assert recorded.context == CONTEXT
    sampler = FixedShapeSampler(folder, torch.float32, 1, recorded.stop_tokens)
    sampler.add(GenerationRequest("longest", ModelInput.of([7] * (CONTEXT - 8)), 8, 1.0, 0))


def test_chat_template_may_require_a_system_message(tmp_path: Path) -> None:
    asks = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('give one') }}{% endif %}"
    folder = make_folder(tmp_path / "policy", tokenizer={"template": asks + CHAT})
    with pytest.raises(ConfigError, match=r"template fails \(give one\)"):
        preflight(recipe_of(folder, chat=True))
    preflight(recipe_of(folder, chat=True, system="Be kind."))
    name_end_tokens(folder)
    assert OVER in PolicyTokenizer(folder).stop_tokens


@pytest.mark.parametrize("reads_clock", [False, True])
def test_prompts_rendered_at_an_unknown_time_are_not_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, reads_clock: bool
) -> None:
    """In older runs a template used the clock of each process that rendered it."""
    template = "It is {{ strftime_now('%S') }}.\n" + CHAT if reads_clock else CHAT
    folder = make_folder(tmp_path / "policy", tokenizer={"template": template})
    with monkeypatch.context() as patch:
        patch.setattr("rollflow.flows.prepare.RunCreated", lambda **of: RunCreated(**of | {"single_start": False}))
        context = prepare(recipe_of(folder, chat=True), "recorded")
    expected = expected_of(context)
    assert ("writes the time" in expected.unchecked, expected.is_thorough) == (reads_clock, not reads_clock)
