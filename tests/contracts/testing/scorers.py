"""Tests the contract of scorers, which `rollflow.tasks.scorers.base` and `rollflow.tasks.scorers.verifier` describe."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.scorers import build_scorer, build_verifier
from rollflow.tasks.scorers.base import Score, ScoreRequest, is_failure, validate_score
from rollflow.tasks.scorers.config import ImportReward, RewardConfig
from rollflow.tasks.scorers.token_values import place_values
from rollflow.tasks.scorers.verifier import Verifier, close_in_thread, score_response
from rollflow.testing.bounds import HANG_SECONDS, call_bounded, import_keys, list_blocking_calls, reach_from_workers

ODD = ("", " ", "none", "-1", "1e999", "\N{SUPERSCRIPT TWO}", "1 7", "\x00", "9" * 400, '{"answer": 17}', "a\nb")


@dataclass(frozen=True)
class ScorerCase:
    """A scorer, the reference of one question, a right answer and a wrong answer."""

    config: RewardConfig
    reference: Mapping[str, Any]
    right: str = "17"
    wrong: str = "1000001"


class ScorerContract:
    """Tests of a scorer. A subclass names the function by `path`, and gives one question's reference and answers."""

    path: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    reference: ClassVar[Mapping[str, Any]] = {}
    right: ClassVar[str] = ""
    wrong: ClassVar[str] = "1000001"
    hang_seconds: ClassVar[float] = HANG_SECONDS

    @pytest.fixture
    def case(self) -> ScorerCase:
        """Return the scorer under test; a subclass may override this fixture."""
        return ScorerCase(ImportReward(**import_keys(type(self))), self.reference, self.right, self.wrong)

    @pytest.fixture
    def verify(self, case: ScorerCase) -> Verifier:
        return build_verifier(case.config)

    @pytest.fixture(autouse=True)
    def tokenizer_of_case(self, case: ScorerCase, tmp_path: Path) -> None:
        """Create a policy's tokenizer, which encodes the responses."""
        folder = tmp_path / "policy"
        folder.mkdir()
        for name, data in build_cold_folder(ColdStart(), [f"{case.right} {case.wrong}"] * 10).items():
            (folder / name).write_bytes(data)
        self.tokenizer = PolicyTokenizer(folder)

    def encode(self, response: str) -> Sequence[int]:
        """Return the tokens of a response."""
        return self.tokenizer.encode_response(response)

    def encode_all(self, responses: Sequence[str]) -> list[Sequence[int]]:
        """Return the tokens of each response."""
        return [self.encode(response) for response in responses]

    @pytest.fixture(autouse=True)
    def reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reach_from_workers(monkeypatch)

    def score(self, verify: Verifier, case: ScorerCase, *responses: str) -> list[Score]:
        """Score responses, one after another, as a worker does; `seconds` is left out, because it differs."""

        def score_all() -> list[Score]:
            try:
                return [
                    score_response(partial(verify, tokens=self.encode(response)), "all", response, case.reference)
                    for response in responses
                ]
            finally:
                close_in_thread([verify])

        scores = call_bounded(score_all, "a scorer", self.hang_seconds)
        return [replace(score, seconds=0.0) for score in scores]

    def test_right_answer_gets_full_reward_and_wrong_one_less(self, case: ScorerCase, verify: Verifier) -> None:
        right, wrong = self.score(verify, case, case.right, case.wrong)
        assert right.outcome is Outcome.CORRECT, f"the right answer {case.right!r} must be correct, but got {right}"
        assert wrong.value < min(right.value, 1.0), f"a wrong answer must get less than a right one, but got {wrong}"

    def test_score_is_a_finite_number_with_an_outcome(self, case: ScorerCase, verify: Verifier) -> None:
        responses = (case.right, case.wrong, *ODD)
        for response, score in zip(responses, self.score(verify, case, *responses), strict=True):
            assert not is_failure(score), (
                f"every response must get a score that is a finite number, but for {response!r}: {score.reason}"
            )
            assert math.isfinite(score.value)

    def test_score_of_a_response_does_not_depend_on_earlier_ones(self, case: ScorerCase, verify: Verifier) -> None:
        responses = (case.right, *ODD)
        first = self.score(verify, case, *responses)
        sentence = "a score must depend on the response and its reference only, because responses are scored again"
        assert self.score(verify, case, *responses[::-1]) == first[::-1], sentence
        assert self.score(build_verifier(case.config), case, *responses) == first, sentence

    def test_scorer_does_not_change_the_reference(self, case: ScorerCase, verify: Verifier) -> None:
        before = copy.deepcopy(dict(case.reference))
        self.score(verify, case, case.right, *ODD)
        assert case.reference == before, "a scorer must not change its reference"

    def test_each_of_many_responses_gets_its_own_score(self, case: ScorerCase, verify: Verifier) -> None:
        """A scorer of several responses returns one score for each of them, in order."""
        responses = [response.strip() for response in (case.wrong, case.right, *ODD, case.right)]
        sentence = "each response must get one score, in order, the same as if it were scored alone"
        alone = self.score(verify, case, *responses)

        async def call() -> list[Any]:
            try:
                references = [case.reference] * len(responses)
                return await verify.call(responses, references, self.encode_all(responses))
            finally:
                await verify.close()

        def score_together() -> list[Any]:
            return asyncio.run(call())

        try:
            together = call_bounded(score_together, "a scorer", self.hang_seconds)
        except ValueError as error:
            pytest.fail(f"{sentence}, but {error}", pytrace=False)
        scores = [validate_score("verifier", score) for score in together]
        assert [score.value for score in scores] == [score.value for score in alone], sentence

    def test_asynchronous_scorer_never_blocks_the_event_loop(self, case: ScorerCase, verify: Verifier) -> None:
        if not verify.is_async:
            return  # a worker makes only one call of the function at a time

        def list_calls() -> list[str]:
            try:
                return list_blocking_calls(lambda: verify(case.right, case.reference, self.encode(case.right)))
            finally:
                close_in_thread([verify])

        blocking = call_bounded(list_calls, "a scorer", self.hang_seconds)
        assert not blocking, f"an asynchronous scorer must await and never block, but it called {blocking}"

    async def score_in_workers(self, case: ScorerCase, responses: Sequence[str]) -> list[Score]:
        """Score responses in worker processes, as a run does."""
        scorer = build_scorer(case.config, self.tokenizer.folder)
        await scorer.start()
        try:
            requests = [ScoreRequest(tokens, case.reference) for tokens in self.encode_all(responses)]
            return await asyncio.wait_for(scorer.score(requests), 2 * self.hang_seconds)
        finally:
            await scorer.close()

    def test_worker_process_gives_the_same_scores(self, case: ScorerCase, verify: Verifier) -> None:
        """A worker process imports the scorer by its path."""
        responses = (case.right, case.wrong, "")
        scores = asyncio.run(self.score_in_workers(case, responses))
        expected = self.place(case, responses, self.score(verify, case, *responses))
        assert [replace(score, seconds=0.0) for score in scores] == expected, (
            "a worker process must give the same scores as this process"
        )

    def test_values_of_tokens_and_steps_fit_the_response(self, case: ScorerCase, verify: Verifier) -> None:
        """A scorer gives each token one value or no value, and each step ends within the response."""
        responses = (case.right, case.wrong, *ODD)
        scores = self.score(verify, case, *responses)
        for response, score in zip(responses, self.place(case, responses, scores), strict=True):
            assert not is_failure(score), (
                f"`token_values` must have the length of the response in tokens, and each of `step_values` must end "
                f"within the response's text, but for {response!r}: {score.reason}"
            )

    def place(self, case: ScorerCase, responses: Sequence[str], scores: Sequence[Score]) -> list[Score]:
        """Convert values of steps to values of tokens, as a worker does."""
        return [
            place_values(score, case.config, self.tokenizer, self.encode(response), response)
            for response, score in zip(responses, scores, strict=True)
        ]
