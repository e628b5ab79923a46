"""Tests with random prompt files and options: a file is rejected in one sentence, or all its prompts can be scored."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollflow.flows.config import load_recipe
from rollflow.flows.preflight import Preflight, preflight
from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.verifier import score_response
from tests.support.counts import examples
from tests.support.refused import refused_alike
from tests.support.waiting import HANG_SECONDS

CONTEXT, NEW = 96, 12
ASKED = 40  # number of training prompts that the test checks

TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)
SHORT = st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1, max_size=6)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SUM = st.integers(0, 999).map(lambda n: (f"{n} + 1?", str(n + 1)))


@st.composite
def good_line(draw: st.DrawFn) -> bytes:
    """Draw a valid row of a prompt file, as a user would write it."""
    question, answer = draw(SUM)
    return json.dumps({"question": question, "answer": draw(st.sampled_from([answer, int(answer)]))}).encode()


@st.composite
def odd_line(draw: st.DrawFn) -> bytes:
    """Draw a row of a prompt file that is invalid or unusual."""
    question, answer = draw(SUM)
    row: dict[str, Any] = {"question": question, "answer": answer}
    kind = draw(st.sampled_from(["type", "key", "text", "long", "deep", "twice", "raw", "tag", "other", "blank"]))
    match kind:
        case "type":
            row[draw(st.sampled_from(["question", "answer"]))] = draw(VALUE)
        case "key":
            row.pop(draw(st.sampled_from(["question", "answer"])))
        case "text":
            row[draw(st.sampled_from(["question", "answer"]))] = draw(TEXT | SHORT | st.sampled_from(["", " ", "\0"]))
        case "long":
            row[draw(st.sampled_from(["question", "answer"]))] = draw(SHORT) * draw(st.integers(1, 400))
        case "deep":
            depth = draw(st.sampled_from([3, 99, 101, 5000]))
            return json.dumps(row).encode()[:-1] + b', "more": ' + b"[" * depth + b"]" * depth + b"}"
        case "twice":
            return json.dumps(row).encode()[:-1] + b', "answer": ' + json.dumps(draw(TEXT)).encode() + b"}"
        case "raw":
            return draw(st.binary(max_size=20))
        case "tag":
            row["answer"] = draw(st.sampled_from(["</answer>", "<answer>", "a</answer>b", "#### 3", "3 #### "]))
        case "other":
            row[draw(TEXT)] = draw(VALUE)
        case "blank":
            return draw(st.sampled_from([b"", b" ", b"\t", b"\r", b"null", b"[]", b"{}"]))
    return json.dumps(row, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Draw a prompt file of mostly valid rows, with the line ends and the byte order mark of some editor."""
    lines = draw(st.lists(good_line(), min_size=draw(st.sampled_from([0, 8, 8, 8])), max_size=20))
    lines = draw(st.permutations(lines + draw(st.lists(odd_line(), max_size=2))))
    if draw(st.booleans()):
        lines = [*lines, *lines[:3]]  # some questions appear twice
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"]))
    last = draw(st.sampled_from([b"", end, end, end, b"\x00"]))
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + end.join(lines) + last


VALID = {
    "prompts.0.held_out": ["0.1", "0.5"],
    "prompts.0.too_long": ['"drop"', '"refuse"'],
    "prompts.0.chat": ["false"],
    "reward.answer": ['"all"', '"tag"'],
    "engine.max_new_tokens": ["12", "60"],
    "evaluation.prompts": ["1", "4"],
}
ODD = {
    "prompts.0.held_out": ["0.0", "0.9", "1.0", "-1", '"many"'],
    "prompts.0.too_long": ['"cut"'],
    "prompts.0.answer_after": ['"####"', '"1"', '""', "3"],
    "prompts.0.chat": ["true"],
    "prompts.0.system": ['"Think."', '""', "7"],
    "reward.answer": ['"last"'],
    "engine.max_new_tokens": ["1", "90", "96", "200"],
    "evaluation.prompts": ["0"],
}


def options_of(values: dict[str, list[str]]) -> st.SearchStrategy[dict[str, str]]:
    return st.fixed_dictionaries({}, optional={key: st.sampled_from(found) for key, found in values.items()})


OPTIONS = st.one_of(options_of(VALID), options_of(VALID), options_of(VALID | ODD))


@pytest.fixture(autouse=True)
def _home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(place / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a recipe whose prompts are in `rows.jsonl`, for a small policy with a cold start. The folder
    is also the run home.
    """
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "recipe.toml").write_text(
        f'[policy.cold_start]\ncontext = {CONTEXT}\n[[prompts]]\nkind = "jsonl"\npath = "{folder}/rows.jsonl"\n'
        f'held_out = 0.3\n[engine]\nkind = "transformers"\nmax_new_tokens = {NEW}\n[reward]\nkind = "exact"\n'
        "[evaluation]\nprompts = 4\n"
    )
    return folder


def judged_right(config: RunConfig, found: Preflight, folder: Path) -> None:
    """Check that every prompt of a run encodes and fits, and that the prompt's reference answer is scored as
    correct.
    """
    for name, data in found.files.items():
        (folder / name).write_bytes(data)
    tokenizer, where = PolicyTokenizer(folder), config.reward.answer
    prompts, verify = open_prompts(config, tokenizer, found.read), build_verifier(config.reward)
    room = tokenizer.context - config.engine.max_new_tokens
    for prompt in [*(prompts.prompt(index) for index in range(ASKED)), *prompts.held_out()]:
        assert 0 < len(prompt.tokens) <= room
        said = prompt.reference["answer"]
        assert isinstance(said, str | int)
        assert str(said).strip()
        text = f"<answer>{said}</answer>" if where == "tag" else str(said)
        for response in (text, tokenizer.decode_response(tokenizer.encode_response(text))):
            assert score_response(verify, where, response, prompt.reference).value == 1.0


def outcome(recipe: Path, options: dict[str, str]) -> tuple[str | None, RunConfig | None, Preflight | None]:
    """Return the error of a rejected recipe, or the config and the prepared parts of an accepted one."""
    try:
        config = load_recipe(recipe, [f"{key}={value}" for key, value in options.items()])
        return None, config, preflight(config)
    except ConfigError as error:
        return str(error), None, None


@pytest.mark.many
@settings(max_examples=examples(1000), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(content=files(), options=OPTIONS)
def test_random_prompt_rows_are_refused_or_scored(
    content: bytes, options: dict[str, str], place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (place / "rows.jsonl").write_bytes(content)
    sentence, config, found = outcome(place / "recipe.toml", options)
    event("accepted" if sentence is None else "refused")
    if sentence is not None:
        assert_one_sentence(sentence)
        return
    assert config is not None
    assert found is not None
    judged_right(config, found, tmp_path_factory.mktemp("policy"))


def assert_one_sentence(sentence: str) -> None:
    """Check that an error names the key that must change. If several keys must change, each has its own line."""
    first, *others = sentence.split("\n")
    assert not others or first.endswith("keys must change:")
    for line in others or [first]:
        assert any(section in line for section in ("prompts", "reward", "engine", "evaluation")), sentence
    sentence.encode()


def rows(answers: Sequence[object], **more: object) -> bytes:
    return b"".join(
        json.dumps({"question": f"{n}?", "answer": a} | more).encode() + b"\n" for n, a in enumerate(answers)
    )


WRONG = {
    "empty answers": rows([""] * 30),
    "a late long prompt": rows(range(40)) + b'{"question": "' + b"x" * 500 + b'", "answer": "1"}\n',
    "no text": rows(["1"] * 20 + [None, [1], 1.0, True]),
    "worked solutions": rows([f"so\n#### {n}" for n in range(30)]),
    "half a surrogate pair": rows(["\ud800"] * 30),
    "no JSON": rows(["1"] * 20) + b"question: 1\n",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_check_and_run_functions_refuse_the_same_prompt_rows(
    content: bytes, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "rows.jsonl").write_bytes(content)
    sentence = refused_alike(capsys, str(place / "recipe.toml"))
    assert sentence.startswith(f"prompts.path = '{place}/rows.jsonl': ")


@pytest.mark.soak
@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_check_and_run_commands_refuse_the_same_prompt_rows(content: bytes, place: Path) -> None:
    (place / "rows.jsonl").write_bytes(content)
    said = []
    for verb in ("check", "run"):
        command = [sys.executable, "-m", "rollflow.flows.commands.cli", verb, str(place / "recipe.toml")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert ended.returncode == 2
        said.append(ended.stderr)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 1
    assert "Traceback" not in said[0]
