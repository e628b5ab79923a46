"""Tests a user's actions in the Prefect UI, in a headless Chromium, on the servers that `rollflow serve` starts."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rollflow.flows.services.stack import find
from rollflow.storage.audit.audit import audit
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import open_store
from tests.e2e.test_runs import SMALL
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
WIDTHS = {"desktop": 1400, "phone": 390}
BLOCK = re.compile(r"versions? \d+.*reward")  # matches the text of a finished box in the graph of a run
MANY = 100_000  # so many versions that no test reaches the end of the run


def command(home: Path, *arguments: str) -> None:
    environment = {**os.environ, "ROLLFLOW_HOME": str(home)}
    environment.pop("PREFECT_API_URL", None)
    line = [sys.executable, "-m", "rollflow.flows.commands.cli", *arguments]
    subprocess.run(line, env=environment, check=True, timeout=RUN_SECONDS)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a run home with running services and two recipes: the run of one recipe ends soon, the other run does not
    end.
    """
    place = tmp_path_factory.mktemp("browser")
    recipes = place / "recipes"
    recipes.mkdir()
    for name, versions in (("short", 12), ("endless", MANY)):
        recipe = SMALL.format(versions=versions, alpha=2, engine="transformers").replace('"small"', f'"{name}"')
        (recipes / f"{name}.toml").write_text(recipe)
    command(place / "home", "deploy", str(recipes))
    command(place / "home", "serve", "--background")
    try:
        yield place / "home"
    finally:
        command(place / "home", "serve", "--end")


class Browser:
    """The browser pages of the Prefect server of one run home."""

    def __init__(self, home: Path, page: Page) -> None:
        up = find(home)
        assert up is not None
        self.page, self.at = page, up.page
        secret = base64.b64encode((home / "prefect" / "auth").read_text().strip().encode()).decode()
        page.add_init_script(f"localStorage.setItem('prefect-password', '{secret}')")
        page.set_default_timeout(HANG_SECONDS * 1000)

    def form_of(self, recipe: str) -> None:
        """Open the form of a recipe's deployment as a user does."""
        self.page.goto(f"{self.at}/deployments")
        self.page.get_by_placeholder("Search deployments").fill(recipe)
        self.page.get_by_text(recipe, exact=True).click()
        self.page.get_by_role("button", name="Run", exact=True).last.click()
        self.page.get_by_text("Custom run").click()
        self.field("Async Ratio").wait_for()

    def field(self, name: str) -> Locator:
        label = self.page.get_by_text(f"{name} (Optional)", exact=True)
        return self.page.locator(".schema-form-property").filter(has=label).last.locator("input")

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit", exact=True).last.click()

    def begin(self) -> None:
        """Submit the form and open the run's page. The click is repeated, because a form that is still being drawn can
        lose a click.
        """
        from playwright.sync_api import TimeoutError as Late

        view, late = self.page.get_by_role("button", name="View run").last, time.monotonic() + HANG_SECONDS
        while True:
            self.submit()
            try:
                return view.click(timeout=20_000)
            except Late:
                if time.monotonic() > late:
                    raise

    def start(self, recipe: str) -> None:
        """Start a run of a recipe and open its page."""
        self.form_of(recipe)
        self.begin()
        self.page.get_by_role("button", name="Suspend", exact=True).wait_for()

    def press(self, name: str, state: str) -> None:
        """Press a button of the run's page and confirm it, until the page shows the run in this state.

        With SQLite, Prefect's server may refuse a request while another request writes. A user would then press the
        button again.
        """
        button = self.page.get_by_role("button", name=name, exact=True).first
        confirms = self.page.locator(".p-modal").get_by_role("button", name=re.compile(f"^(Submit|Confirm|{name})$"))
        limit = time.monotonic() + RUN_SECONDS
        while time.monotonic() < limit:
            if button.is_visible():
                button.click()
                confirms.last.click()
            if self.is_soon(state):
                return
        raise TimeoutError(f"waited {RUN_SECONDS:g} s for {state!r} on {self.page.url}")

    def wait(self, state: str) -> None:
        """Wait until the run's page shows this state."""
        limit = time.monotonic() + RUN_SECONDS
        while not self.is_soon(state):
            if time.monotonic() > limit:
                raise TimeoutError(f"waited {RUN_SECONDS:g} s for {state!r} on {self.page.url}")

    def is_soon(self, state: str) -> bool:
        """Return whether the page shows the state within 20 seconds; if not, reload the page."""
        from playwright.sync_api import TimeoutError as Late

        badge = self.page.locator(".page-heading .state-badge")
        with suppress(Late):
            badge.get_by_text(state, exact=True).wait_for(timeout=20_000)
            return True
        self.page.reload()
        badge.wait_for()
        return False

    def tab(self, name: str) -> None:
        self.page.locator(".p-tabs, .p-tab-navigation").get_by_text(name, exact=True).first.click()

    def shot(self, name: str) -> None:
        """Take screenshots at both widths if the environment variable ROLLFLOW_SHOTS names a folder."""
        folder = os.environ.get("ROLLFLOW_SHOTS")
        for width in WIDTHS if folder else ():
            self.page.set_viewport_size({"width": WIDTHS[width], "height": 1000})
            self.page.wait_for_timeout(2000)
            self.page.screenshot(path=f"{folder}/{name}-{width}.png")
        self.page.set_viewport_size({"width": WIDTHS["desktop"], "height": 1000})


@pytest.fixture
def browser(home: Path) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright  # the import starts playwright's driver

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield Browser(home, chromium.new_page())
        chromium.close()


def test_prefect_form_starts_a_run(browser: Browser, home: Path) -> None:
    page = browser.page
    browser.form_of("short")
    browser.shot("form")
    browser.field("Async Ratio").fill("-1")
    browser.submit()
    refused = page.get_by_text("'config.async_ratio'. Failure reason: -1 is less than the minimum of 0")
    refused.first.wait_for()
    browser.shot("refused")
    browser.field("Async Ratio").fill("1")
    browser.begin()
    browser.wait("Completed")
    browser.tab("Task Runs")
    page.get_by_text(BLOCK).first.wait_for()
    page.get_by_text("audit: clean").wait_for()
    browser.shot("graph")
    assert len(list((home / "store" / "runs").iterdir())) == 1  # refused requests created no run
    report = audit(open_store(str(one_run(home, "short"))))
    assert report.violations == []

    at = page.url
    browser.tab("Artifacts")
    page.get_by_text("progress-").first.click()
    page.get_by_text("held-out").first.wait_for()
    browser.shot("table")
    page.goto(at)
    browser.tab("Artifacts")
    page.get_by_text("reward-").first.click()
    page.locator("img[src*=png]").first.wait_for()
    browser.shot("plot")


def test_run_is_suspended_resumed_cancelled_and_retried(browser: Browser, home: Path) -> None:
    browser.start("endless")
    until(lambda: versions_of(home) > 2)
    browser.press("Suspend", "Suspended")
    browser.shot("suspended")
    browser.press("Resume", "Running")
    browser.press("Cancel", "Cancelled")
    browser.shot("cancelled")
    before = versions_of(home)
    browser.press("Retry", "Running")
    until(lambda: versions_of(home) > before)
    browser.press("Cancel", "Cancelled")
    assert audit(open_store(str(one_run(home, "endless")))).violations == []


def one_run(home: Path, recipe: str) -> Path:
    (found,) = (home / "store" / "runs").glob(f"{recipe}-*")
    return found


def versions_of(home: Path) -> int:
    """Return how many versions the endless run has published, or -1 if the run's folder does not exist yet."""
    if not list((home / "store" / "runs").glob("endless-*")):
        return -1
    log = Log(open_store(str(one_run(home, "endless"))))
    log.follow()
    return log.state.version
