"""A verifier reads every token that the policy chose, special tokens included, except the final stop token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import END, PAD, build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import parse_recorded
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import ScoreRequest
from rollflow.tasks.scorers.config import ExactReward
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.verifier import score_response
from tests.support.waiting import HANG_SECONDS

TAGS = ("<answer>", "</answer>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a policy whose answer tags are special tokens, as chat models have."""
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(), ["Say 7 (3)."] * 10).items():
        (path / name).write_bytes(data)
    fast = Tokenizer.from_file(str(path / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    fast.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (f"<answer>7</answer>{END}", "<answer>7</answer>"),
        ("<answer>7</answer>", "<answer>7</answer>"),  # the response ended at its limit
        (f"{END}7{END}", f"{END}7"),
        (f"{PAD}7{PAD}", f"{PAD}7{PAD}"),
        (f"7{END}{END}", f"7{END}"),
        (END, ""),
        ("", ""),
    ],
)
def test_response_text_omits_only_the_final_stop_token(folder: Path, response: str, text: str) -> None:
    tokenizer = PolicyTokenizer(folder)
    assert tokenizer.decode_response(tokenizer.encode_response(response)) == text
    assert tokenizer.decode(tokenizer.encode_response(response)) == response


def test_special_tokens_of_a_response_can_be_left_out(folder: Path) -> None:
    tokenizer = PolicyTokenizer(folder)
    assert tokenizer.decode_response(tokenizer.encode_response(f"{PAD}<answer>7</answer>{END}"), special=False) == "7"


@pytest.mark.long
@pytest.mark.parametrize(("special", "reward"), [(True, 1.0), (False, 0.0)])
async def test_worker_scores_tags_that_are_tokens(folder: Path, special: bool, reward: float) -> None:
    tokens = PolicyTokenizer(folder).encode_response(f"<answer>7</answer>{END}")
    pool = RewardPool(ExactReward(answer="tag", special_tokens=special), folder)
    await pool.start()
    try:
        [score] = await asyncio.wait_for(pool.score([ScoreRequest(tokens, {"answer": "7"})]), HANG_SECONDS)
    finally:
        await pool.close()
    assert score.value == reward


@pytest.mark.parametrize("recorded", [{}, {"special_tokens": True}])
def test_recorded_runs_keep_their_scoring_rules(recorded: dict[str, object]) -> None:
    """A run that is older than the key continues without special tokens."""
    config = RunConfig().model_dump(mode="json")
    assert config["reward"].pop("special_tokens") is True
    config["reward"] |= recorded
    assert parse_recorded(config).reward.special_tokens is bool(recorded)


@pytest.mark.parametrize("reference", ["", " ", "\n", "7"])
@pytest.mark.parametrize(("where", "response"), [("tag", "7"), ("tag", "<answer></answer>"), ("all", " "), ("all", "")])
def test_missing_answer_equals_no_reference_answer(where: str, response: str, reference: str) -> None:
    score = score_response(build_verifier(ExactReward()), where, response, {"answer": reference})
    assert (score.value, score.reason) == (0.0, "no answer")
