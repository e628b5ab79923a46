"""Shows a played episode on the terminal: who speaks, what is said, and the score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from rollflow.flows.views.turns import render_head, render_part
from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score

GOOD = {Outcome.CORRECT: "green", Outcome.PARTIAL: "yellow"}


class Screen:
    """Prints to a console."""

    def __init__(self, console: Console) -> None:
        """Print to this console."""
        self._console = console

    def begin(self, number: int, episodes: int | None, what: str) -> None:
        """Show the beginning of an episode."""
        of = f" of {episodes}" if episodes else ""
        self._console.print()
        self._console.print(Rule(f"episode {number}{of} · {what}", align="left", style="dim"))

    def head(self, speaker: str, notes: Sequence[str] = ()) -> None:
        """Show who speaks next."""
        self._console.print(render_head(speaker, notes))

    def say(self, speaker: str, text: str, notes: Sequence[str] = ()) -> None:
        """Show what somebody says."""
        self._console.print(render_part(speaker, text, notes))

    def note(self, text: str) -> None:
        """Show a remark that comes neither from the player nor from the environment."""
        self._console.print(Text(f"  ({text})", style="dim"))

    def score(self, score: Score) -> None:
        """Show the score of an episode: its value, outcome, parts and reason."""
        if score.outcome is Outcome.UNJUDGED:
            line = Text("no score · nobody could judge the episode", style="bold red")
        else:
            colour = GOOD.get(score.outcome, "red")
            line = Text(f"score {score.value:g} · {score.outcome.value}", style=f"bold {colour}")
        self._console.print(line)
        if score.parts:
            parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
            self._console.print(Padding(Text(f"parts: {parts}"), (0, 0, 0, 2), expand=False))
        if score.reason:
            self._console.print(Padding(Text(score.reason), (0, 0, 0, 2), expand=False))

    def summarize(self, scores: Sequence[Score]) -> None:
        """Show the mean score of all episodes that ended."""
        judged = [score for score in scores if score.outcome is not Outcome.UNJUDGED]
        if not judged:
            return
        mean = sum(score.value for score in judged) / len(judged)
        counts = Counter(score.outcome.value for score in scores)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        episodes = f"{len(scores)} episode{'s' * (len(scores) > 1)}"
        self._console.print()
        self._console.print(Text(f"{episodes} · mean score {mean:.3g} · {outcomes}", style="bold"))
