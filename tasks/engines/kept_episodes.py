"""Keeps the tokens of episodes in a simulated KV cache while their environments work."""

from __future__ import annotations


class KeptEpisodes:
    """Maps each episode without a running request to its number of cached tokens; episodes without a name are not
    kept.
    """

    def __init__(self, keeps: bool = True) -> None:
        """Start without kept episodes; if `keeps` is false, never keep an episode."""
        self._keeps = keeps
        self._tokens: dict[str, float] = {}  # episode -> cached tokens, in the order in which the turns ended
        self.total = 0.0

    def put(self, episode: str, tokens: float) -> None:
        """Keep an episode's tokens in the cache."""
        if not episode or not self._keeps:
            return
        self.take(episode)
        self._tokens[episode] = tokens
        self.total += tokens

    def take(self, episode: str) -> float:
        """Remove an episode, and return the number of its tokens; 0 if the episode is not kept."""
        tokens = self._tokens.pop(episode, 0.0)
        self.total = self.total - tokens if self._tokens else 0.0
        return tokens

    def evict(self, room: float) -> None:
        """Remove the episodes whose turns ended first, until the rest needs at most `room` tokens."""
        while self._tokens and self.total > room:
            self.take(next(iter(self._tokens)))

    def clear(self) -> None:
        """Remove all episodes."""
        self._tokens.clear()
        self.total = 0.0
