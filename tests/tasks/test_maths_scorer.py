"""Tests the verifier `maths` on pairs of a reference answer and a response, and on hostile answers in a worker
process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.prompt_check import read_files
from rollflow.tasks.scorers import build_scorer, build_verifier
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.config import ChoiceReward, MathsReward, RegexReward, RewardConfig
from rollflow.tasks.scorers.reference_process import ReferenceChecker
from rollflow.tasks.scorers.references import find_reference_fault
from rollflow.tasks.scorers.text.maths import LONGEST, MOST_DIGITS, maths
from tests.support.waiting import HANG_SECONDS

MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
THINK = "Let me think. First, 3 + 4 = 7, then 6 * 7 = 42.\n"
# (reference, response)
RIGHT: list[tuple[str, str]] = [
    # The examples of math-verify's own page
    (r"${1,3} \cup {2,4}$", r"${1,2,3,4}$"),
    (r"$\frac{1}{2}$", r"$0.5$"),
    (r"1/2", r"\boxed{\frac{1}{2}}"),
    (r"$(1,2)$", r"$(1,2)$"),
    (r"$x = 5$", r"$5$"),
    (r"1/3", r"0.333333"),
    (r"$x>1$", r"$1<x$"),
    # Integers and decimals
    ("42", "42"),
    ("42", "42."),
    ("42", " 42 \n"),
    ("42", r"\boxed{42}"),
    ("42", r"$\boxed{42}$"),
    ("42", r"\[\boxed{42}\]"),
    ("42", r"\fbox{42}"),
    ("42", r"\boxed {42}"),
    ("42", "<answer>42</answer>"),
    ("42", THINK + "<answer> $42$ </answer> Done."),
    ("42", THINK + "#### 42"),
    ("42", THINK),
    ("42", "The answer is 42."),
    ("42", "The final answer is $42$. I hope it is correct."),
    ("42", "**Answer:** 42"),
    ("42", "**42**"),
    ("42", "42.0"),
    ("42", "+42"),
    ("-42", "-42"),
    ("-42", "\N{MINUS SIGN}42"),
    ("-42", r"\boxed{-42}"),
    ("0.5", ".5"),
    ("0.125", r"\boxed{\frac18}"),
    ("3.14", "3.140"),
    ("007", "7"),
    # The last box, nested boxes, text after the box
    ("42", r"\boxed{41}? No: \boxed{42}"),
    ("42", r"\boxed{\boxed{42}}"),
    ("42", r"\boxed{\text{\boxed{42}}}"),
    ("42", r"\boxed{42} is the number of apples, as 41 was wrong. And 17 is prime."),
    ("42", r"\boxed{x = 42}"),
    ("42", r"<answer>\boxed{42}</answer>"),
    ("42", r"\boxed{42}, so again: \boxed{42}"),
    # Thousands
    ("1000", "1,000"),
    ("1,000", "1000"),
    ("1234567", r"\boxed{1,234,567}"),
    ("1234567", r"\boxed{1\,234\,567}"),
    ("1234567", r"\boxed{1{,}234{,}567}"),
    ("1000000", "1 000 000"),
    ("1000000", r"\boxed{1\ 000\ 000}"),
    ("12345.67", "12,345.67"),
    # Fractions and mixed numbers
    ("1/2", "2/4"),
    ("1/2", r"\dfrac{1}{2}"),
    ("1/2", r"\tfrac12"),
    ("1/2", "\N{VULGAR FRACTION ONE HALF}"),
    ("-1/2", r"-\frac{1}{2}"),
    ("-1/2", r"\frac{-1}{2}"),
    ("3.5", "3 1/2"),
    ("7/2", r"3\frac{1}{2}"),
    ("7/2", "The answer is 3 1/2."),
    ("3 1/2", "3.5"),
    (r"\frac{a}{b}", "a/b"),
    # Percentages
    ("50%", "50%"),
    (r"50\%", "50"),
    ("50", r"\boxed{50\%}"),
    ("0.5", "50%"),
    ("50%", "1/2"),
    ("12.5", "12.5 percent"),
    # Units and money
    ("5", "5 cm"),
    ("5", r"\boxed{5\text{ cm}}"),
    ("5", r"\boxed{5 \text{ cm}^2}"),
    ("5", r"\boxed{5\ \mathrm{m/s}}"),
    ("10", "10 m/s"),
    ("5 dollars", r"\boxed{\$5}"),
    (r"\$5.00", "5"),
    ("42 apples", "42"),
    ("42", "42 widgets"),
    ("42", r"\boxed{42\text{ widgets per hour}}"),
    ("90", r"90^\circ"),
    ("90", "90\N{DEGREE SIGN}"),
    # Powers, roots, constants
    ("8", "2^3"),
    ("8", "2**3"),
    ("512", "2**3**2"),
    ("10^{100}", "10**10**2"),
    ("10^{10}", "10000000000"),
    ("x^2", "x\N{SUPERSCRIPT TWO}"),
    (r"\sqrt{2}", "\N{SQUARE ROOT}2"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sqrt[3]{8}", "2"),
    (r"2\pi", "2\N{GREEK SMALL LETTER PI}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    ("0.00015", "1.5e-4"),
    ("0.00015", r"1.5 \times 10^{-4}"),
    ("6", "3!"),
    ("3+2i", "2i+3"),
    # Expressions
    ("x^2-1", "(x-1)(x+1)"),
    ("x(x+1)", r"\boxed{x^2+x}"),
    ("2x", r"x \cdot 2"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\log_2 8", "3"),
    ("xy", "yx"),
    (r"e^{x+1}", r"e \cdot e^x"),
    # Equations and inequalities
    ("5", "x = 5"),
    ("x=5", r"\boxed{5}"),
    ("y = 2x + 1", "y=1+2x"),
    ("x + y = 1", "y = 1 - x"),
    ("x<3", "3>x"),
    (r"x \le 3", "x \N{LESS-THAN OR EQUAL TO} 3"),
    # Sets, lists, intervals, tuples
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1,2", "2, 1"),
    ("1, 2", r"\boxed{1} and \boxed{2}"),
    ("1, 2", r"\boxed{1}, and \boxed{2}"),
    ("(2, 2), (6, 2)", r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$"),
    ("1, 2", r"\(\boxed{1}\) and \(\boxed{2}\)"),
    ("1, 2", r"\boxed{1, 2}"),
    ("1, 2", r"\boxed{1 \text{ and } 2}"),
    ("-1, 1", r"x=1 or x=-1"),
    (r"\emptyset", "\N{EMPTY SET}"),
    (r"\emptyset", r"\varnothing"),
    ("[1,2]", r"\left[1, 2\right]"),
    ("(1,2]", r"\boxed{(1,2]}"),
    ("[1,2]", "1 \N{LESS-THAN OR EQUAL TO} x \N{LESS-THAN OR EQUAL TO} 2"),
    ("1<x<2", "(1,2)"),
    (r"(-\infty, 3)", "x<3"),
    (r"[0,1) \cup (2,3]", r"(2,3] \cup [0,1)"),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \pi/2 \right)"),
    ("(1,2,3)", "(1, 2, 3)"),
    (r"x \in [1,2]", "[1,2]"),
    # Matrices
    (MATRIX, MATRIX.replace("pmatrix", "bmatrix")),
    (MATRIX, rf"\boxed{{{MATRIX}}}"),
    (MATRIX, r"\begin{pmatrix} 1 & 2 \\ 3 & 2^2 \end{pmatrix}"),
    # Words
    ("Evelyn", r"\boxed{\text{Evelyn}}"),
    (r"\text{Evelyn}", "evelyn."),
    ("yes", "Yes"),
    ("no solution", r"\boxed{\text{No solution}}"),
    (r"\text{E}", "$E$"),
    ("E", r"\boxed{\text{E}}"),
    (r"\(\boxed{\text{C}}\).", r"\boxed{\text{(C)}}"),
    # A reference answer that is a whole solution
    (r"First, $x = \boxed{3}$? No. So $x + 1 = \boxed{5}$ is the answer.", "5"),
    (r"Thus the domain is: \[ \boxed{(2, 12) \cup (12, 102)} \]", r"x \in \boxed{(2,12) \cup (12,102)}"),
    # Ratios, bases, other scripts
    ("2:3", "2/3"),
    ("2:3", "2:3"),
    ("12_5", r"12_{5}"),
    ("42", "\N{ARABIC-INDIC DIGIT FOUR}\N{ARABIC-INDIC DIGIT TWO}"),
    ("42", r"\boxed{" + "\N{FULLWIDTH DIGIT FOUR}\N{FULLWIDTH DIGIT TWO}}"),
    ("3.14", r"\approx 3.14"),
    # Tiny numbers
    (r"1.6\times 10^{-19}", "1.60e-19"),
    (r"1.6\times 10^{-19}\text{ C}", r"1.6\times 10^{-19}"),
    ("10^{-20}", r"\frac{1}{10^{20}}"),
    (r"\{10^{-20}, 5\}", r"\{5, 10^{-20}\}"),
    ("0.00001%", "0.0000001"),
]
WRONG: list[tuple[str, str]] = [
    ("42", "41"),
    ("42", "-42"),
    ("42", "4.2"),
    ("42", r"\boxed{42} no, wait: \boxed{41}"),
    ("42", r"42 is tempting, but \boxed{41}"),
    ("42", "<answer>42</answer> or rather <answer>41</answer>"),
    ("42", "#### 42\n#### 41"),
    ("2", r"\boxed{1} or \boxed{2}"),
    ("2", r"\boxed{1 or 2}"),
    ("1, 2", r"\boxed{1}. \boxed{2}"),
    ("2", r"\boxed{1} \quad \text{or} \quad \boxed{2}"),
    (r"The answer is \boxed{5} and not 6.", "6"),
    (r"\text{E}", "F"),
    ("2", r"\boxed{1, 2, 3}"),
    ("2", r"\boxed{\{1, 2\}}"),
    ("42", "42 43"),
    ("1/2", "2/1"),
    ("1/3", "0.33"),
    ("7/2", "31/2"),
    ("3 1/2", "3/2"),
    ("1000", "1"),
    ("1,000", "1"),
    (r"\pi", "3.14"),
    ("5", "5 million"),
    ("5", "5 dozen"),
    ("5", "50%"),
    ("12_5", "12_7"),
    ("x^2-1", "(x-1)(x-1)"),
    ("x^2", "x2"),
    ("x=5", "y=5"),
    ("x<3", "x>3"),
    (r"x \le 3", "x<3"),
    ("(1,2)", "(2,1)"),
    ("(1,2]", "[1,2)"),
    ("[1,2]", "(1,2)"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("1,2", "1"),
    (MATRIX, r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}"),
    (MATRIX, r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}"),
    ("Evelyn", "nevelyE"),
    ("no solution", r"\boxed{0}"),
    ("5", r"\boxed{\text{no solution}}"),
    ("8", "2*3"),
    ("3+2i", "3-2i"),
    ("0.00015", "1.5e4"),
    (r"\sqrt{2}", "2"),
    ("42", "x"),
    ("0", r"\emptyset"),
    ("10:30", "10:45"),
    # Numbers that rounding to six digits after the point makes 0
    (r"1.6\times 10^{-19}", r"9.1\times 10^{-31}"),
    (r"1.6\times 10^{-19}", "1.7e-19"),
    ("10^{-20}", "10^{-21}"),
    (r"\sqrt{2}\cdot 10^{-20}", r"\pi\cdot 10^{-20}"),
    ("0.0000001", "0.0000004"),
    ("0.0000002", "0.0"),
    (r"\{10^{-20}, 5\}", r"\{10^{-21}, 5\}"),
    ("x = 10^{-20}", "x = 10^{-21}"),
]
UNPARSABLE: list[tuple[str, str]] = [
    ("42", ""),
    ("42", "   "),
    ("42", "I do not know."),
    ("42", r"\boxed{}"),
    ("42", r"\boxed{ $ $ }"),
    ("42", "<answer></answer>"),
    ("42", r"So it is \boxed{42"),
    ("42", "####"),
    ("42", r"\boxed{" + "{" * 30 + "42" + "}" * 30 + "}"),
    ("42", r"\boxed{" + "9" * (MOST_DIGITS + 1) + "}"),
    ("42", r"\boxed{42" + " + 0" * LONGEST + "}"),
    ("42", r"\boxed{" + r"\sqrt{" * 200 + "42" + "}" * 200 + "}"),
]


def score(gold: str, response: str, **keys: Any) -> Score:
    return maths(response, {"answer": gold}, **keys)


def test_maths_data_has_at_least_150_answer_pairs() -> None:
    assert len(RIGHT) + len(WRONG) + len(UNPARSABLE) >= 150


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_mathematically_equal_answer_is_correct(gold: str, response: str) -> None:
    found = score(gold, response)
    assert (found.value, found.outcome) == (1.0, Outcome.CORRECT), found.reason
    assert "equals" in found.reason


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_mathematically_different_answer_is_wrong(gold: str, response: str) -> None:
    found = score(gold, response)
    assert (found.value, found.outcome) == (0.0, Outcome.WRONG), found.reason
    assert "differs from" in found.reason


@pytest.mark.parametrize(("gold", "response"), UNPARSABLE)
def test_missing_or_huge_maths_answer_is_unparsable(gold: str, response: str) -> None:
    found = score(gold, response)
    assert (found.value, found.outcome) == (0.0, Outcome.UNPARSABLE), found.reason


def test_only_a_marked_answer_counts_if_marks_are_required() -> None:
    assert score("42", "The answer is 42.", marked=True).outcome is Outcome.UNPARSABLE
    assert score("42", r"The answer is \boxed{42}.", marked=True).outcome is Outcome.CORRECT


def test_config_key_decimals_decides_which_numbers_are_equal() -> None:
    assert score("1/3", "0.33", decimals=2).value == 1.0
    assert score("1/3", "0.33", decimals=3).value == 0.0


def test_verifier_gets_the_keys_of_the_config() -> None:
    verify = build_verifier(MathsReward(marked=True, decimals=2))
    assert verify(r"\boxed{0.33}", {"answer": "1/3"}).value == 1.0
    assert verify("0.33", {"answer": "1/3"}).value == 0.0


HOSTILE = [
    (r"\boxed{10^{10^{10}}}", {"answer": "5"}),
    (r"\boxed{10**10**10}", {"answer": "5"}),
    (r"\boxed{(10^9)!}", {"answer": "5"}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "hostile", "fine"),
    [
        (MathsReward(deadline_seconds=3.0), HOSTILE, (r"\boxed{5}", {"answer": "5"})),
        (
            RegexReward(deadline_seconds=3.0, match="search"),
            [("a" * 60 + "!", {"pattern": "(a+)+$"})],
            ("aa", {"pattern": "(a+)+$"}),
        ),
    ],
    ids=["maths", "regex"],
)
async def test_hostile_maths_response_ends_as_a_timeout(
    tmp_path: Path,
    config: RewardConfig,
    hostile: list[tuple[str, Mapping[str, Any]]],
    fine: tuple[str, Mapping[str, Any]],
) -> None:
    """The responses before and after a hostile response get their scores."""
    rows = [fine, *hostile, fine]
    for name, data in build_cold_folder(ColdStart(), [text for text, _ in rows] * 10).items():
        (tmp_path / name).write_bytes(data)
    tokenizer, scorer = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), build_scorer(config, tmp_path)
    await scorer.start()
    try:
        requests = [ScoreRequest(tokenizer.encode(text).ids, reference) for text, reference in rows]
        found = await asyncio.wait_for(scorer.score(requests), 8 * HANG_SECONDS)
    finally:
        await scorer.close()
    outcomes = [one.outcome for one in found]
    assert outcomes == [Outcome.CORRECT, *[Outcome.TIMEOUT] * len(hostile), Outcome.CORRECT]


@pytest.mark.parametrize(
    ("config", "reference", "fault"),
    [
        (MathsReward(), {"answer": "42"}, None),
        (MathsReward(), {"answer": r"$\frac{1}{2}$"}, None),
        (MathsReward(), {"answer": r"\text{Evelyn}"}, None),
        (MathsReward(), {"answer": " "}, "the answer is empty"),
        (MathsReward(), {"answer": "1 + " * LONGEST}, "the answer has 4,000 characters"),
        (ChoiceReward(), {"answer": "B"}, None),
        (ChoiceReward(), {"answer": "Berlin", "options": ["Rome", "Oslo"]}, "the answer 'Berlin' must be one of"),
        (RegexReward(), {"answer": "x", "pattern": "a+"}, None),
        (RegexReward(), {"answer": "x"}, "the row has no text in its column"),
        (RegexReward(pattern="(?P<n>.)", group="n"), {"answer": "x"}, None),
        (RegexReward(pattern="(?P<n>.)", group="n"), {}, "the answer is empty, and reward.group compares"),
        (RegexReward(), {"answer": "x", "pattern": "("}, "the pattern '(' is not a valid regular expression"),
    ],
)
def test_maths_row_that_cannot_be_scored_is_refused(
    config: RewardConfig, reference: dict[str, Any], fault: str | None
) -> None:
    found = find_reference_fault(config, reference)
    assert found is None if fault is None else found and found.startswith(fault)


@pytest.mark.long
def test_check_of_a_maths_row_that_never_ends_is_killed(tmp_path: Path) -> None:
    """The rows are checked in a process of their own, so no row can hang or crash the check."""
    path = tmp_path / "rows.jsonl"
    answers = ["7", r"\frac{1}{2}", "10^{10^{10}}", "10^{10^{11}}", "", "x + 1"]
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": one}) + "\n" for n, one in enumerate(answers)))
    config = parse_config(
        {
            "prompts": [{"kind": "jsonl", "path": str(path)}],
            "reward": {"kind": "maths", "deadline_seconds": 3.0},
        }
    )
    with pytest.raises(ConfigError) as refused:
        read_files(config, read_file)
    what = "line 3: its check did not end within reward.deadline_seconds = 3, and scoring a response would take as long"
    assert str(refused.value).startswith(f"prompts.path = {str(path)!r}: {what}; correct the row, or remove it (2 such")


@pytest.mark.long
def test_maths_row_that_crashes_its_check_is_refused() -> None:
    with ReferenceChecker() as checker:
        assert checker.find(MathsReward(), {"answer": "x^2"}) is None
        [process] = checker._processes.values()
        process.kill()
        fault = checker.find(MathsReward(), {"answer": "x^3"})
        assert fault is not None
        assert "ended the process that checked it, with exit code -9" in fault
        assert checker.find(MathsReward(), {"answer": "x^4"}) is None
    assert process.poll() is not None
