"""Tests `rollflow compare`: the numbers of a run, the differences between runs, and the self-contained page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.tracking.mlflow_run import VERSION
from rollflow.flows.tracking.status_writer import points_of
from rollflow.flows.views.compare import (
    ComparedRun,
    VersionCurve,
    describe_same_weights,
    diff_configs,
    group_seeds,
    read_compared,
)
from rollflow.flows.views.compare_page import SECTIONS, SHOWN, compare_page
from rollflow.flows.views.progress_blocks import block_rows
from rollflow.flows.views.summary import summarize
from rollflow.storage.audit.audit import audit
from rollflow.tasks.actors.statuses import RolloutStatus
from rollflow.tasks.rollout.evaluation import DomainResult, Evaluation, store_evaluation
from rollflow.tasks.run.context import RunContext
from tests.support import small_run
from tests.support.described import change_config
from tests.support.refused import refused
from tests.support.small_run import SUMS, prepare_small, train_small


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train 3 of 6 versions; `other` has another seed and rate; `fresh` is only prepared."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.setenv("COLUMNS", "110")
        context = prepare_small(home)
        train_small(context, 3)
        runs = Path(context.uri).parent
        shutil.copytree(context.uri, runs / "other")
        other = RunContext(str(runs / "other"), home / "cache")
        train = context.config.train.model_dump(mode="json")
        change_config(other.store, seed=7, train={**train, "learning_rate": 0.25})
        prepare_small(home, "fresh")
        yield context


def test_compare_prints_differences_and_writes_a_page(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(Path(trained.uri).parent / "other")
    assert main(["compare", "small", "fresh"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["version", "3", "of", "6", "none", "of", "6"] in lines
    assert not any(line[:1] == ["async_ratio"] for line in lines)
    assert main(["compare", "small", other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == {"seed": ["0", "7"], "train.learning_rate": ["0.001", "0.25"]}
    versions = [trained.policies.find(number) for number in range(4)]
    curves = found["runs"][0]["curves"]
    tokens = [one.metrics["response_tokens"] for one in versions[1:]]
    assert curves["reward"]["values"] == [one.metrics["reward"] for one in versions[1:]]
    assert curves["reward"]["tokens"] == [tokens[0], sum(tokens[:2]), sum(tokens)]
    assert curves["reward"]["seconds"] == [one.at - versions[0].at for one in versions[1:]]
    lost = versions[3].metrics["discarded_tokens"]  # a group was discarded while batch 2 was formed
    assert lost == 21
    assert curves["waste"]["values"] == [0, 0, lost / (lost + tokens[2])]
    page = Path(found["page"]).read_text()
    assert "<td>0.25</td>" in page


def test_compare_refuses_bad_arguments(trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "run 'small' is named twice" in refused(capsys, "compare", "small", trained.uri)
    assert "nobody': there is no such run" in refused(capsys, "compare", "small", "nobody")
    assert "cannot be written" in refused(capsys, "compare", "small", "--html", f"{tmp_path}/file/page.html")


def made_up(name: str, versions: int = 1000, rise: float = 1.0, **config: str) -> ComparedRun:
    """Build a run for a comparison; the value of each curve rises linearly from 0 to `rise`."""
    x = np.arange(1.0, versions + 1)
    curve = VersionCurve(x, x * 1000, x * 2, np.linspace(0, rise, versions))
    curves = {what: curve for charts in SECTIONS.values() for what, _ in charts}
    return ComparedRun(name, {"versions": str(versions), **config}, {"audit": "clean"}, {"s": "1"}, {}, curves)


def test_comparison_page_is_small_and_self_contained() -> None:
    page = compare_page([made_up(f"run-{n}", rise=1 + n, rate=str(n)) for n in range(5)])
    assert len(page.encode()) < 2**20
    assert "<script" not in page
    assert "http" not in page


def test_comparison_page_has_charts_of_sources_and_reward_parts() -> None:
    run = made_up("a", 11)
    assert "Domains and reward parts" not in compare_page([run])
    more = dict.fromkeys(("reward of sums", "part short of sums", "response length of sums"), run.curves["reward"])
    page = compare_page([replace(run, curves={**run.curves, **more})])
    assert "Domains and reward parts" in page
    assert all(f"{name} by policy version" in page for name in more)


@pytest.mark.long
def test_reward_parts_of_a_run_appear_in_every_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner computes the reward parts from the rows of a batch. They appear in the log, MLflow, the run's page,
    the comparison and the summary.
    """
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    build = small_run.trajectory
    parts = {"short": 0.5, "rules.no_comma": 1.0}
    monkeypatch.setattr(small_run, "trajectory", lambda *given: replace(build(*given), reward_parts=parts))
    two = [SUMS, {"kind": "reasoning-gym", "family": "gcd"}]
    context = prepare_small(tmp_path, versions=2, prompts=two)
    train_small(context)
    metrics = context.policies.find(2).metrics
    assert (metrics["part_basic_arithmetic_short"], metrics["part_gcd_rules.no_comma"]) == (0.5, 1.0)
    assert {"reward_basic_arithmetic", "accuracy_gcd", "response_length_gcd"} <= metrics.keys()
    points = list(points_of(context, VERSION, range(1, 3)))
    assert [point.metrics["rollout/part_gcd_short"] for point in points] == [0.5, 0.5]
    [row] = block_rows(context, [(1, 2)])
    assert (row["short, gcd"], row["reward, gcd"]) == ("0.500", f"{metrics['reward_gcd']:.3f}")
    domains = {"gcd": DomainResult(0.25, 0.5, 4), "basic_arithmetic": DomainResult(0.75, 0.5, 4)}
    store_evaluation(context.store, Evaluation(1, 0.5, 0.5, 8, 3.0, True, domains=domains))
    [run] = read_compared([context])
    assert run.curves["held-out accuracy of gcd"].values.tolist() == [0.25]
    assert run.curves["accuracy"].versions.tolist() == [1]
    assert "held-out accuracy of gcd by policy version" in compare_page([run])
    assert run.curves["part short of gcd"].values.tolist() == [0.5, 0.5]
    assert run.result["part short of gcd, last 5"] == "0.500"
    assert not any("no_comma" in name for name in run.curves)
    summary = summarize(context, audit(context.store), {}, RolloutStatus(), {})
    assert summary["alarms"] == []


def test_runs_that_differ_only_by_seed_share_one_band(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollflow.flows.views import compare_page as page

    runs = [made_up("a", 11, seed="0"), made_up("b", 11, 3.0, seed="1"), made_up("c", 11, rate="2")]
    assert [[run.name for run in group] for group in group_seeds(runs)] == [["a", "b"], ["c"]]
    assert diff_configs(runs) == {"seed": ("0", "1", "unset"), "rate": ("unset", "unset", "2")}
    short = VersionCurve(
        *(part[:6] for part in (np.arange(1.0, 12), np.arange(1.0, 12), np.arange(1.0, 12), np.zeros(11)))
    )
    band = page._build_band("a", "", "", [runs[1].curves["reward"], short], "versions")
    assert (band.x[0], band.x[-1], len(band.x)) == (1, 6, SHOWN)
    assert (band.low[-1], band.middle[-1], band.high[-1]) == pytest.approx(
        (0, 0.75, 1.5)
    )  # the second curve has risen halfway to 3.0
    assert "a and 1 other seed<" in compare_page(runs)
    elsewhere = [
        made_up("a", 11),
        made_up("b", 11, **{"cluster.address": "10.0.0.1:6379", "cluster.lease_seconds": "60"}),
    ]
    assert [[run.name for run in group] for group in group_seeds(elsewhere)] == [
        ["a", "b"]
    ]  # the cluster that a run used is not a part of its recipe
    again = [made_up("a", 11, seed="0"), made_up("b", 11, seed="0"), made_up("c", 11, seed="1")]
    assert "a and 2 other runs<" in compare_page(again)


def test_long_curve_is_thinned_to_means() -> None:
    from rollflow.flows.views.compare_page import _thin

    x, y = _thin(np.arange(2.0 * SHOWN), np.tile([0.0, 1.0], SHOWN))
    assert x.tolist() == [2 * n + 0.5 for n in range(SHOWN)]
    assert set(y) == {0.5}


class Heard(HTMLParser):
    """The tags and attributes of a page that a screen reader needs."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_comparison_page_is_readable_by_a_screen_reader() -> None:
    heard = Heard()
    heard.feed(compare_page([made_up("<b>one</b>"), made_up("two", rate="2")]))
    assert heard.of("html") == [{"lang": "en"}]
    assert len(heard.of("h1")) == len(heard.of("main")) == 1
    texts = [image["alt"] or "" for image in heard.of("img")]
    assert len(texts) == 9
    assert "training reward by seconds. <b>one</b>: 0" in texts[5]
    assert not heard.of("b")
    assert len(heard.of("caption")) == len(heard.of("table")) == 3
    assert all(cell.get("scope") in ("row", "col") for cell in heard.of("th"))
    ids = [attributes["id"] for _, attributes in heard.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_runs_of_one_recipe_and_seed_have_the_same_weights(
    trained: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(Path(trained.uri).parent / "other")
    assert main(["compare", "small", other, "fresh", "--json"]) == 0
    alike, none = json.loads(capsys.readouterr().out)["weights"]
    assert alike.endswith("the same weights in versions 0 to 3, all that both have, by sha256")
    assert none.endswith("no version to compare")
    assert main(["compare", "small", other]) == 0
    out = capsys.readouterr().out
    assert alike in out
    assert trained.policies.find(3).sha256[:12] in out


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({0: {"m": "a"}, 1: {"m": "b"}}, "the same weights in versions 0 to 1"),
        ({0: {"m": "a"}, 1: {"m": "c"}}, "the same weights up to version 0, other weights from version 1 on"),
        ({0: {"m": "c"}}, "one and two: other weights from version 0 on"),
        ({0: {"m-1": "a", "m-2": "a"}}, "weights in other files, which hashes cannot compare, from version 0 on"),
    ],
)
def test_weights_are_compared_by_hash(there: dict[int, dict[str, str]], words: str) -> None:
    two = replace(made_up("two", versions=1), policies={0: {"m": "a"}, 1: {"m": "b"}})
    one = replace(made_up("one", versions=1), policies=there)
    [told] = describe_same_weights([two, one])
    assert words in told
