"""Tests alarms for reward hacking: suspicious metrics raise an alarm, ordinary metrics do not, and users and MLflow see
the alarms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rollflow.flows.config import load_recipe
from rollflow.flows.tracking.mlflow_payload import list_figures
from rollflow.flows.tracking.status_writer import StatusWriter
from rollflow.flows.tracking.tracking import shown_name
from rollflow.flows.views import reward_alarms
from rollflow.flows.views.console import print_summary, render
from rollflow.flows.views.reward_alarms import (
    FLIP_LIMIT,
    Ends,
    compute_lower_bound,
    find_alarms,
    find_flip_alarms,
    find_lone_part,
    has_drifted,
    scan_alarms,
)
from rollflow.flows.views.status import RunStatus, read_status
from rollflow.flows.views.summary import _list_flips
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts, counts_path
from rollflow.tasks.actors.statuses import LearnerStatus, RewardStatus, RolloutStatus
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from tests.flows.test_status_writer import NoTracker, Seen
from tests.support.described import describe

Series = Callable[[float], float]  # share of the run that is over -> value of a metric
COUNT = 60


def rising(first: float, last: float) -> Series:
    return lambda far: first + (last - first) * far


def versions(count: int = COUNT, **series: Series) -> list[PolicyVersion]:
    """Return version 0 and `count` trained versions."""
    made = []
    for number in range(count + 1):
        metrics = {name: value(number / count) for name, value in series.items()} if number else {}
        made.append(PolicyVersion(number, number, 0, 0.0, number or None, (), (), (), metrics, ""))
    return made


HACKED = {
    "reward": rising(0.3, 0.7),
    "accuracy": rising(0.2, 0.2),
    "part_sums_answer": rising(0.2, 0.2),
    "part_sums_short": rising(0.1, 0.9),
}
LEARNED = {
    "reward": rising(0.3, 0.9),
    "accuracy": rising(0.25, 0.95),
    "part_sums_answer": rising(0.25, 0.95),
    "part_sums_format": rising(0.0, 0.0),
    "response_length": rising(6, 6),
}


def test_rise_from_a_single_reward_part_raises_an_alarm() -> None:
    [alarm] = find_alarms(versions(**HACKED), ["sums"])
    assert (alarm.kind, alarm.domain, alarm.part, alarm.first, alarm.last) == ("part", "sums", "short", 1, COUNT)
    assert (
        "the reward rose from 0.34 to 0.67 by its part 'short' alone, and the accuracy did not rise" in alarm.sentence
    )
    assert alarm.headline == "possible reward hacking in sums: only the reward part 'short' rises"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"accuracy": rising(0.2, 0.6)}, "the accuracy rises, too"),
        ({"reward": rising(0.3, 0.35)}, "the reward hardly rises"),
        ({"part_sums_answer": rising(0.2, 0.6)}, "two parts rise"),
        ({"part_sums_answer": rising(1.0, 1.0)}, "no other part could rise"),
        ({"part_sums_short": rising(0.5, 0.1), "part_sums_answer": rising(0.2, 0.2)}, "no part rises"),
    ],
)
def test_ordinary_curves_of_reward_parts_raise_no_alarm(change: dict[str, Series], why: str) -> None:
    assert find_alarms(versions(**{**HACKED, **change}), ["sums"]) == [], why


def test_normal_run_of_the_quick_start_raises_no_alarm() -> None:
    """There is no alarm while answers are only partly right. A reward part that every response already gets in full
    cannot rise.
    """
    assert find_alarms(versions(**LEARNED), ["sums"]) == []
    partial = {**LEARNED, "accuracy": rising(0.0, 0.0), "part_sums_answer": rising(0.1, 0.5)}
    assert find_alarms(versions(**partial), ["sums"]) == []


def test_quick_start_reward_can_raise_no_alarm() -> None:
    """The quick start's reward has no parts, and its longest response is too short for the alarm of length drift."""
    config = load_recipe(Path("flows/recipes/sorting.toml"))
    assert (config.reward.kind, config.reward.format) == ("exact", None)
    assert config.engine.max_new_tokens < reward_alarms.LENGTH_TOKENS
    assert len(config.shares) == 1


def test_run_with_too_few_policy_versions_raises_no_alarm() -> None:
    assert find_alarms(versions(reward_alarms.LEAST - 1, **HACKED), ["sums"]) == []
    assert find_alarms([], ["sums"]) == []
    assert find_alarms(versions(), ["sums"]) == []  # a run of an earlier release has no parts


def test_reward_with_a_single_part_raises_no_alarm() -> None:
    alone = {name: series for name, series in HACKED.items() if name != "part_sums_answer"}
    assert find_alarms(versions(**alone), ["sums"]) == []


def test_value_before_penalties_does_not_count_as_a_reward_part() -> None:
    """A scorer with a format penalty records the score before the penalty as "answer". This score rises together with
    the part that it contains.
    """
    parts = {"answer": Ends(0.3, 0.8), "short": Ends(0.1, 0.6), "maths": Ends(0.2, 0.2), "format": Ends(-0.02, -0.02)}
    assert find_lone_part(Ends(0.28, 0.78), parts) == "short"
    assert find_lone_part(Ends(0.5, 0.9), parts) == ""  # here "answer" is a part, because it is not the sum
    both = parts | {"length_penalty": Ends(-0.1, -0.05)}
    assert find_lone_part(Ends(0.18, 0.73), both) == "short"


@pytest.mark.parametrize(
    ("first", "last", "drifts"),
    [(40, 90, True), (90, 40, True), (40, 79, False), (5, 15, False), (16, 32, True), (100, 100, False), (0, 16, True)],
)
def test_length_alarm_needs_a_relative_and_an_absolute_change(first: float, last: float, drifts: bool) -> None:
    assert has_drifted(Ends(first, last)) is drifts


def test_drift_of_response_length_in_one_source_raises_alarm() -> None:
    """Each prompt domain is compared only with itself, even if its name begins like the name of another domain."""
    series = {
        "response_length": rising(40, 40),
        "response_length_sums": rising(20, 80),
        "response_length_sums_long": rising(60, 60),
    }
    [alarm] = find_alarms(versions(**series), ["sums", "sums_long"])
    assert (alarm.kind, alarm.domain) == ("length", "sums")
    assert "the mean response length changed from 26 to 76 tokens" in alarm.sentence


def test_reward_parts_of_sources_with_similar_names_are_separate() -> None:
    series = {f"{name}_a_b" if "part" not in name else name.replace("sums", "a_b"): one for name, one in HACKED.items()}
    [alarm] = find_alarms(versions(**series), ["a", "a_b"])
    assert (alarm.domain, alarm.part) == ("a_b", "short")
    assert reward_alarms.list_parts(versions(**series), "a", ["a", "a_b"]) == {}


def test_alarms_ignore_the_subparts_of_a_reward_part() -> None:
    series = {**HACKED, "part_sums_rules.no_comma": rising(0.0, 1.0)}
    assert [*reward_alarms.list_parts(versions(**series), "sums", ["sums"])] == ["answer", "short"]


def test_summary_keeps_an_alarm_that_the_status_has_dropped() -> None:
    """The hacking happens in the first 60 of 300 versions."""
    early = {name: (lambda far, one=one: one(min(1.0, far * 5))) for name, one in HACKED.items()}
    run = versions(300, **early)
    assert find_alarms(run, ["sums"]) == []
    [alarm] = scan_alarms(run, ["sums"])
    assert (alarm.part, alarm.last <= 160) == ("short", True)
    assert scan_alarms(versions(300, **LEARNED), ["sums"]) == []
    assert scan_alarms([], ["sums"]) == []


def test_reward_alarms_are_shown_to_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    sentence = find_alarms(versions(**HACKED), ["sums"])[0].sentence
    status = RunStatus.from_json(RunStatus("r", alarms=(sentence,)).to_json())
    assert status.alarms == (sentence,)
    Console(width=90).print(render(status))
    assert "the accuracy did not rise" in capsys.readouterr().out
    print_summary({"run_id": "r", "alarms": [sentence]})
    assert "by its part 'short' alone" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert RunStatus.from_json('{"run_id": "an older run"}').alarms == ()


def test_reward_alarms_and_parts_have_names_in_mlflow() -> None:
    names = ["alarms", "part_sums_short", "response_length_sums", "reward_sums"]
    assert [shown_name(name) for name in names] == [f"rollout/{name}" for name in names]
    summary: dict[str, Any] = {
        "accuracy": {"before": 0.1, "after": 0.2},
        **dict.fromkeys(("seconds", "training_seconds", "tokens", "tokens_per_second", "discarded_tokens"), 1),
        "recoveries": {},
        "cpu_seconds": {},
        "audit": "clean",
        "idle": {},
        "alarms": ["one", "two"],
    }
    assert list_figures(summary)["alarms"] == 2.0
    assert list_figures({name: value for name, value in summary.items() if name != "alarms"})["alarms"] == 0.0


@pytest.mark.parametrize(
    ("flips", "verdicts", "raised"),
    [
        (0, 1000, False),
        (1, 20, False),
        (1, 1, False),
        (19, 19, False),
        (3, 20, True),
        (3, 100, False),
        (60, 1000, True),
    ],
)
def test_many_flipped_verdicts_raise_an_alarm_but_one_does_not(flips: int, verdicts: int, raised: bool) -> None:
    found = find_flip_alarms({"reward": verdicts, "rewards.b": 500}, {"reward": flips, "rewards.b": 0})
    assert [alarm.section for alarm in found] == ["reward"] * raised
    assert not raised or f"[reward]: {flips} of {verdicts} verdicts flipped" in found[0].sentence


def test_wilson_lower_bound_matches_a_hand_calculation() -> None:
    """For 3 flips of 20 verdicts, the bound is (0.15 + 0.1659 - 2.576 x 0.10258) / 1.3318."""
    assert compute_lower_bound(3, 20) == pytest.approx(0.0388, abs=5e-5)
    assert compute_lower_bound(0, 20) == pytest.approx(0.0, abs=1e-12)
    assert compute_lower_bound(1, 1) > FLIP_LIMIT, "so a smallest number of verdicts is needed, too"


def test_flipped_verdicts_are_reported_in_status_and_messages(tmp_path: Path) -> None:
    describe(open_store(str(tmp_path)), "flips", RunConfig())
    context, tracker = RunContext(str(tmp_path), tmp_path / "cache"), cast(Any, NoTracker())
    many = RewardStatus(second_verdicts={"reward": 40}, flips={"reward": 20})
    seen = Seen(RolloutStatus(), LearnerStatus(), many)
    writer = StatusWriter(context, seen, tracker)
    for reward in (many, RewardStatus(), many):  # the reward actor is restarted
        seen.reward = reward
        writer.refresh()
    status = read_status(context)
    assert status is not None
    assert status.alarms == (find_flip_alarms({"reward": 40}, {"reward": 20})[0].sentence,)
    assert writer.warnings == [*status.alarms]
    assert status.messages.count("verdicts of [reward] flip when responses are judged again") == 1
    version = PolicyVersion(1, 1, 0, 0.0, 1, (), (), (), {}, "")
    assert writer._metrics_of(version)["alarms"] == 1.0
    context.store.put(counts_path("reward"), SecondVerdictCounts("a", 40, 20).encode())
    assert _list_flips(context) == [*status.alarms]
    context.store.put(counts_path("reward"), SecondVerdictCounts("a", 40, 1).encode())
    assert _list_flips(context) == []
