"""Tests the console output (panel, plain lines and summary), and that a status is unchanged after conversion to JSON
and back.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rollflow.flows.commands.doctor import print_checks, run_checks
from rollflow.flows.views.console import (
    LiveView,
    PlainView,
    draw_sparkline,
    format_duration,
    open_view,
    plain_line,
    print_summary,
    render,
    staleness_bar,
)
from rollflow.flows.views.status import RunStatus, StageStatus

STATUS = RunStatus(
    "arithmetic-1",
    phase="training",
    version=94,
    versions=150,
    reward=0.736,
    rewards=tuple(i / 94 for i in range(94)),
    accuracy=((0, 0.312), (25, 0.55), (50, 0.712)),
    staleness={0: 1000, 1: 1000, 2: 2000},
    tokens_per_second=5120.4,
    tokens_per_second_total=4803.0,
    buffer_groups=48,
    buffer_capacity=96,
    in_flight_groups=58,
    stages={
        "rollout": StageStatus("Running", "engine 0 at version 94", 0.03),  # the state's name in Prefect's spelling
        "train": StageStatus("Failed", "lost its learner", 0.5),
        "odd": StageStatus("pondering"),
    },
    seconds=187.4,
    messages=("engine 0 was restarted",),
)


def drawn(status: RunStatus, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(render(status, width))
    return console.export_text().splitlines()


def test_status_ignores_fields_of_a_newer_rollflow() -> None:
    assert RunStatus.from_json(STATUS.to_json()) == STATUS
    newer = STATUS.to_json()[:-1] + ', "invented": 1}'
    assert RunStatus.from_json(newer) == STATUS
    for bad in ("[]", "{}", '{"run_id": "x", "phase": "dancing"}', "{"):
        with pytest.raises(ValueError):
            RunStatus.from_json(bad)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_view_fits_the_terminal_width(width: int) -> None:
    lines = drawn(STATUS, width)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 13
    for shown in ("arithmetic-1", "94 / 150", "0.736", "31.2% v0 → 55.0% v25 → 71.2% v50", "0 25%", "1 25%", "2 50%"):
        assert shown in text
    for shown in (
        "5,120 tokens/s",
        "48 of 96 groups",
        "● running",
        "✗ failed",
        "idle  50%",
        "engine 0 was restarted",
        "3:07",
    ):
        assert shown in text
    assert "██████░░░░░░" in text  # the buffer is half full


def test_live_view_shows_a_run_without_a_trained_version() -> None:
    assert "nothing trained yet" in "\n".join(drawn(RunStatus("x"), 80))


def test_trained_domain_shares_are_shown_beside_configured_ones() -> None:
    two = replace(STATUS, domains={"gcd": 30, "lcm": 10}, shares={"gcd": 0.7, "lcm": 0.3})
    assert RunStatus.from_json(two.to_json()) == two
    assert "gcd 75% of 70%  lcm 25% of 30%" in "\n".join(drawn(two, 100))
    stream = io.StringIO()
    domains = {"gcd": {"groups": 30, "share": 0.75, "asked": 0.7}, "lcm": {"groups": 10, "share": 0.25, "asked": 0.3}}
    print_summary({"domains": domains}, stream)
    assert "gcd 75.0% (asked 70.0%)   lcm 25.0% (asked 30.0%)" in stream.getvalue()


def test_live_view_shows_first_and_latest_accuracy() -> None:
    many = replace(STATUS, accuracy=tuple((v, v / 100) for v in range(0, 100, 10)))
    assert "0.0% v0 ⋯ 60.0% v60 → 70.0% v70 → 80.0% v80 → 90.0% v90" in "\n".join(drawn(many, 100))


def test_live_view_shows_pass_at_k_if_known() -> None:
    several = replace(STATUS, pass_at={2: 0.801, 4: 0.9})
    assert "@2 80.1%  @4 90.0%" in "\n".join(drawn(several, 100))
    assert "held-out 71.2%" in plain_line(several)
    assert {"pass@2 80.1%", "pass@4 90.0%"} <= set(plain_line(several))
    assert RunStatus.from_json(several.to_json()) == several
    assert "pass@" not in "\n".join([*drawn(STATUS, 100), *plain_line(STATUS)])
    stream = io.StringIO()
    passes = {"before": {"4": 0.25}, "after": {"4": 0.5}, "by_version": {"0": {"4": 0.25}, "150": {"4": 0.5}}}
    print_summary({"pass_at": passes}, stream)
    assert "held-out pass@4  25.0% → 50.0%" in stream.getvalue()
    print_summary({"pass_at": {"before": None, "after": None, "by_version": {}}}, bare := io.StringIO())
    assert "pass@" not in bare.getvalue()


def test_sparkline_scales_to_its_range_and_averages_neighbours() -> None:
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([0, 0, 7, 7], 2) == "▁█"
    assert draw_sparkline([3, 3], 8) == "▁▁"
    assert draw_sparkline([], 8) == ""


def test_staleness_bar_length_is_proportional_to_staleness() -> None:
    assert staleness_bar({0: 1, 1: 3}, 8).plain == "████████  0 25%  1 75%"
    assert [span.style for span in staleness_bar({0: 1, 1: 3}, 8).spans][:2] == ["green", "cyan"]


def test_durations_are_formatted_for_people() -> None:
    assert [format_duration(s) for s in (0.4, 59.9, 60, 187.4, 3723)] == ["0 s", "59 s", "1:00", "3:07", "1:02:03"]


def test_plain_progress_lines_are_rate_limited() -> None:
    now = [0.0]
    stream = io.StringIO()
    with PlainView(stream, every_seconds=5.0, clock=lambda: now[0]) as view:
        view.show(STATUS)
        view.show(STATUS)  # no line, because the status has not changed
        now[0] = 1.0
        view.show(replace(STATUS, version=95, seconds=188))  # no line, because the last line is too recent
        now[0] = 6.0
        view.show(replace(STATUS, version=96, seconds=193))
        now[0] = 20.0
        view.show(replace(STATUS, version=96, seconds=207))  # no line, because only the time has changed
        messages = (*STATUS.messages, "second")
        view.show(replace(STATUS, version=97, seconds=208, messages=messages))
        view.show(replace(STATUS, version=97, seconds=209, messages=messages, phase="done"))
    assert stream.getvalue().splitlines() == [
        "[3:07] engine 0 was restarted",
        "[3:07] training | version 94/150 | reward 0.736 | held-out 71.2% | staleness 0:1000 1:1000 2:2000 | "
        "5,120 tok/s | buffer 48/96 | train failed, odd pondering",
        *[line for line in stream.getvalue().splitlines() if "version 96/150" in line],
        "[3:28] second",
        *[line for line in stream.getvalue().splitlines() if "version 97/150" in line],
    ]
    assert stream.getvalue().count("version 96/150") == 1
    # one line has the message, the other says that the run is done
    assert stream.getvalue().count("version 97/150") == 2


def test_live_view_is_opened_only_on_a_terminal() -> None:
    assert isinstance(open_view(io.StringIO()), PlainView)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with LiveView(console=console) as view:
        view.show(STATUS)
    assert "5,120" in terminal.getvalue()  # the last status stays on the screen


def test_summary_leaves_out_missing_values() -> None:
    stream = io.StringIO()
    summary = {
        "run_id": "arithmetic-1",
        "accuracy": {"before": 0.312, "after": 0.874},
        "versions": 150,
        "seconds": 301.2,
        "tokens_per_second": 5023.3,
        "staleness": {"0": 1, "1": 1},
        "async_ratio": 2,
        "idle": {"rollout": 0.03, "train": 0.2},
        "audit": "clean",
        "storage": "/home/me/runs/arithmetic-1",
        "prefect": "http://127.0.0.1:4200/runs/flow-run/1",
        "mlflow": "mlflow ui",
    }
    print_summary(summary, stream)
    for shown in (
        "31.2% → 87.4%",
        "150 in 5:01",
        "5,023",
        "0 50%",
        "(bound 2)",
        "rollout 3%",
        "clean",
        "runs/arithmetic-1",
    ):
        assert shown in stream.getvalue()
    bare = io.StringIO()
    print_summary({"versions": 3}, bare)
    assert "held-out" not in bare.getvalue()


def test_doctor_hides_secrets_and_names_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key")
    monkeypatch.setenv("PREFECT_API_URL", "http://me:hidden@127.0.0.1:9/api")
    stream = io.StringIO()
    checks = run_checks(tmp_path / "home")
    print_checks(checks, stream)
    found = {check.name: check for check in checks}
    assert found["AWS credentials"].found == "yes (environment)"
    assert found["Prefect server"].outcome == "missing"
    assert found["prefect"].outcome == "ok"
    assert "hidden" not in stream.getvalue()


def test_doctor_names_relevant_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hidden@hub/x")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("PYTHONWARNINGS", "")
    found = {check.name: check for check in run_checks(tmp_path / "home")}
    assert found["environment"].outcome == "ok"
    assert "HTTPS_PROXY" in found["environment"].found
    assert found["Ray server"].outcome == "note"
    assert "cluster.address" in found["Ray server"].found
    assert "tracking.uri" in found["MLflow server"].found
    assert "hidden" not in found["MLflow server"].found
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    found = {check.name: check for check in run_checks(tmp_path / "home")}
    assert found["environment"].outcome == "missing"
    assert "unset PYTHONWARNINGS" in found["environment"].found
    assert not (tmp_path / "home").exists(), "to look changes nothing"


def test_run_page_address_is_empty_without_a_server() -> None:
    print_summary(
        {"storage": "/a/run", "prefect": "rollflow serve", "mlflow": "http://127.0.0.1/#/x"}, out := io.StringIO()
    )
    storage, prefect, mlflow = (line for line in out.getvalue().splitlines() if "│" in line)
    assert "shown by rollflow serve" in prefect
    assert "shown by" not in storage + mlflow
