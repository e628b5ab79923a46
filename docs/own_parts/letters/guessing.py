"""An environment as TRL's `environment_factory` takes it. Nothing in this module comes from rollflow."""

from __future__ import annotations


class HigherOrLower:
    """The policy finds a number by guessing."""

    def __init__(self, most: int = 10) -> None:
        self.most = most
        self.guesses, self.is_found = 0, False

    def reset(self, answer: str = "1", **row: object) -> str:
        """Begin an episode with the row of a prompt."""
        self.number = int(answer)
        return f" The number is at most {self.most}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the number that you guess
        """
        self.guesses += 1
        self.is_found = number == self.number
        return "right" if self.is_found else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        """Return a reward that is higher for fewer guesses."""
        return 1 / self.guesses if self.is_found else 0.0
