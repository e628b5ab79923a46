"""Measures the accuracy of a model on a run's held-out prompts, during the run's supervised cold start."""

from __future__ import annotations

from typing import Any

from rollflow.tasks.policies.cold_start import HeldOutAccuracy, generate_answers
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.config import name_section
from rollflow.tasks.scorers.verifier import close_in_thread, judge_correct


class HeldOutJudge:
    """Generates and judges answers to the held-out prompts. A `HeldOutJudge` must be used and closed in the same
    thread."""

    def __init__(self, context: RunContext) -> None:
        self._config, self._tokenizer = context.config, context.tokenizer
        self._prompts, decode = context.prompts().held_out(), context.tokenizer.decode_response
        scorers = self._config.scorers
        self._verifiers = {name: build_verifier(reward, name_section(name)) for name, reward in scorers.items()}
        self._judges = {name: judge_correct(self._verifiers[name], reward, decode) for name, reward in scorers.items()}

    def __enter__(self) -> HeldOutJudge:
        return self

    def __exit__(self, *_: object) -> None:
        """End what the verifiers keep, such as the sandboxes that ran the programs in the answers."""
        close_in_thread(self._verifiers.values())

    def __call__(self, model: Any) -> HeldOutAccuracy:
        """Return the accuracy of a model on the held-out prompts."""
        config, asked = self._config, [prompt.tokens for prompt in self._prompts]
        responses = generate_answers(
            model,
            asked,
            self._tokenizer.stop_tokens[0],
            config.engine.max_new_tokens,
            config.evaluation.temperature,
            config.seed,
        )
        domains = dict[str, list[bool]]()
        for prompt, tokens in zip(self._prompts, responses, strict=True):
            right = self._judges[prompt.scorer](tokens, prompt.reference)
            domains.setdefault(prompt.domain, []).append(right)
        return HeldOutAccuracy.of(domains, config.accuracy_shares)
