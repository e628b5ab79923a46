"""Measures the accuracy of a model on the held-out prompts of a run, during the supervised cold start.

With the environment `single-turn`, the model answers each prompt once. With any other environment, the model plays an
episode for each prompt.
"""

from __future__ import annotations

from typing import Any

from rollflow.tasks.environments import build_environment, close_environment
from rollflow.tasks.environments.config import SingleTurnEnvironment
from rollflow.tasks.policies.cold_start import HeldOutAccuracy, generate_answers
from rollflow.tasks.policies.vocabulary import read_vocabulary
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.run.held_out_episodes import BatchedModel, play_episodes
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import Score, ScoreRequest, failure_score, validate_score
from rollflow.tasks.scorers.config import name_section
from rollflow.tasks.scorers.verifier import (
    answer_of,
    apply_threshold,
    close_in_thread,
    judge_correct,
    runner_of_thread,
)


class HeldOutJudge:
    """Generates and judges answers to the held-out prompts. A `HeldOutJudge` must be used and closed in one thread."""

    def __init__(self, context: RunContext) -> None:
        self._config, self._tokenizer = context.config, context.tokenizer
        self._prompts, decode = context.prompts().held_out(), context.tokenizer.decode_response
        scorers = self._config.scorers
        self._verifiers = {name: build_verifier(reward, name_section(name)) for name, reward in scorers.items()}
        self._judges = {name: judge_correct(self._verifiers[name], reward, decode) for name, reward in scorers.items()}

    def __enter__(self) -> HeldOutJudge:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the resources of the verifiers, such as sandboxes."""
        close_in_thread(self._verifiers.values())

    def __call__(self, model: Any) -> HeldOutAccuracy:
        """Return the accuracy of a model on the held-out prompts."""
        single = isinstance(self._config.environment, SingleTurnEnvironment)
        domains = dict[str, list[bool]]()
        for prompt, right in zip(self._prompts, self._answer(model) if single else self._play(model), strict=True):
            domains.setdefault(prompt.domain, []).append(right)
        return HeldOutAccuracy.of(domains, self._config.accuracy_shares)

    def _answer(self, model: Any) -> list[bool]:
        """Answer each prompt once; return whether each answer is correct."""
        config, asked = self._config, [prompt.tokens for prompt in self._prompts]
        responses = generate_answers(
            model,
            asked,
            self._tokenizer.stop_tokens[0],
            config.engine.max_new_tokens,
            config.evaluation.temperature,
            config.seed,
        )
        return [
            self._judges[prompt.scorer](tokens, prompt.reference)
            for prompt, tokens in zip(self._prompts, responses, strict=True)
        ]

    def _play(self, model: Any) -> list[bool]:
        """Play an episode of each prompt; return whether each episode ended correctly."""
        config, tokenizer = self._config, self._tokenizer
        batched = BatchedModel(model, tokenizer, config.evaluation.temperature, config.seed)
        environment, ports = build_environment(config.environment), build_ports(config, tokenizer)
        size, longest = read_vocabulary(tokenizer.folder), config.engine.max_new_tokens
        asked = self._prompts, longest, self._score, size, ports, config.environment.most_episodes

        async def play() -> list[bool]:
            try:
                return await play_episodes(batched, environment, *asked)
            finally:
                await close_environment(environment)

        return runner_of_thread().run(play())

    async def _score(self, request: ScoreRequest) -> Score:
        """Score a response for an environment. An error in the verifier becomes a score of 0 with the error as the
        reason."""
        config, verifier = self._config.scorers[request.scorer], self._verifiers[request.scorer]
        text = self._tokenizer.decode_response(request.tokens, config.special_tokens)
        try:
            asked = [answer_of(text, config.answer)], [request.reference], [request.tokens]
            score = validate_score("verifier", (await verifier.call(*asked))[0])
        except Exception as error:  # noqa: BLE001 - a verifier is user code, whose error is the reason for this score
            score = failure_score("verifier", error)
        return apply_threshold(score, config.correct_from)
