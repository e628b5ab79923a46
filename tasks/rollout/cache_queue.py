"""The cache queue: a slot queue that admits episodes by the tokens that they hold in the engines' KV caches.

- An episode is admitted to the engine with the most room, once its tokens fit into the engine's KV cache together with
  `TURNS_AHEAD` more turns of every episode on the engine. The episode then has a *claim* on that engine.
- A turn of an episode with a claim runs on the engine of the claim, which still has the tokens of earlier turns, and
  goes before all episodes without a claim.
- An episode keeps its claim while its environment works (the episode is *parked*). If the claims on an engine, with one
  more turn of each episode, outgrow the cache, parked episodes lose their claims: first the episode with the fewest
  tokens, which are computed again at the lowest cost. The next turn of such an episode waits to be admitted again.
- Episodes without a claim are admitted in the order of the queue. An engine without claims admits any episode, so that
  an episode that is larger than a cache also runs.
- A claim ends when its episode requests no more generations, or when its engine ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.slots import MEMORY, EngineSlots, SlotQueue, Ticket

# Turns of growth for which an engine has room when it admits an episode. With less room, an episode that was evicted is
# soon admitted and evicted again.
TURNS_AHEAD = 3


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """The KV caches of the engines, in tokens of the scheduler."""

    capacity: int  # number of tokens that fit into the KV cache of one engine
    per_episode: int = 0  # number of tokens that each episode occupies in addition to those of its requests


@dataclass(eq=False, slots=True)
class CacheClaim:
    """The tokens that an episode holds in the KV cache of one engine."""

    episode: str
    lane: EngineSlots
    tokens: int
    stamp: int = 0  # number of the claim's entry among the parked claims; 0 while a turn of the episode runs or waits


@dataclass(eq=False, slots=True)
class CacheUse:
    """The claims on one engine."""

    capacity: int
    claims: int = 0
    tokens: int = 0
    parked: list[tuple[int, int, CacheClaim]] = field(default_factory=list)  # heap: (tokens, stamp, claim)
    # heap of turns of episodes with a claim, which wait for a slot of this engine
    returning: list[tuple[tuple[float, int], Ticket]] = field(default_factory=list)

    def fits(self, tokens: int, turn: float) -> bool:
        """Return whether an episode fits, with `TURNS_AHEAD` more turns of `turn` tokens for each episode."""
        return not self.claims or self.tokens + tokens + TURNS_AHEAD * turn * (self.claims + 1) <= self.capacity


class CacheQueue(SlotQueue):
    """A queue that admits episodes by their tokens. See the module's docstring."""

    def __init__(self, limits: CacheLimits, routing: Routing, replacement_seconds: float) -> None:
        super().__init__(routing, replacement_seconds)
        self._limits = limits
        self._claims: dict[str, CacheClaim] = {}
        self._uses: dict[EngineSlots, CacheUse] = {}
        self._stamp = count(1)
        self._turn: float | None = None  # moving average of the tokens by which a turn lets an episode grow
        self.evicted = 0  # number of claims that parked episodes lost

    @property
    def admitted(self) -> int:
        """Number of episodes with a claim."""
        return len(self._claims)

    @property
    def uses(self) -> Mapping[EngineSlots, CacheUse]:
        """The claims on each engine."""
        return self._uses

    def put(self, place: int, lane: EngineSlots) -> EngineSlots | None:
        """Register an engine, as `SlotQueue.put` specifies."""
        self._uses[lane] = CacheUse(self._limits.capacity)
        return super().put(place, lane)

    def remove(self, lane: EngineSlots) -> None:
        """Remove a lane, as `SlotQueue.remove` specifies; its episodes are admitted again elsewhere."""
        super().remove(lane)
        self._forget_engine(lane)
        self._dispatch()

    async def take(self, ticket: Ticket) -> EngineSlots | None:
        """Wait for a slot: of the engine of the episode's claim, or of an engine that admits the episode."""
        claim = self._claims.get(ticket.episode)
        if claim is None:
            return await super().take(ticket)
        claim.stamp = 0
        ticket.wait()
        heapq.heappush(self._uses[claim.lane].returning, (ticket.turn, ticket))
        self._return_turns(claim.lane)
        return await self._wait(ticket)

    def release(self, lane: EngineSlots, ticket: Ticket) -> None:
        """Free the ticket's slot, and park the ticket's episode."""
        claim = self._claims.get(ticket.episode)
        if claim is not None and claim.lane is lane:
            self._park(claim, ticket.tokens + self._limits.per_episode)
        super().release(lane, ticket)

    def end_episode(self, episode: str) -> None:
        """Drop the claim of an episode whose policy generates no more tokens."""
        claim = self._claims.get(episode)
        if claim is not None:
            self._drop(claim)
            self._dispatch()

    def offer_slots(self, lane: EngineSlots) -> None:
        """Give an engine's free slots to the turns of its episodes, and then to waiting episodes."""
        if lane.failure is not None:
            self._forget_engine(lane)
        else:
            self._return_turns(lane)
        super().offer_slots(lane)

    def _return_turns(self, lane: EngineSlots) -> None:
        waiting = self._uses[lane].returning
        while waiting and lane.free > 0:
            ticket = heapq.heappop(waiting)[1]
            if ticket.waits:
                super()._grant(ticket, lane)

    def _grant(self, ticket: Ticket, lane: EngineSlots) -> None:
        if ticket.episode:
            claim = CacheClaim(ticket.episode, lane, ticket.tokens + self._limits.per_episode)
            use, self._claims[ticket.episode] = self._uses[lane], claim
            use.claims += 1
            use.tokens += claim.tokens
        super()._grant(ticket, lane)

    def _choose(self, ticket: Ticket) -> EngineSlots | None:
        if not ticket.episode:
            return super()._choose(ticket)
        tokens = ticket.tokens + self._limits.per_episode
        fitting = [
            lane for lane in self._places.values() if lane.free > 0 and self._uses[lane].fits(tokens, self._turn or 0.0)
        ]
        return max(fitting, key=lambda lane: self._uses[lane].capacity - self._uses[lane].tokens, default=None)

    def _park(self, claim: CacheClaim, tokens: int) -> None:
        """Note the size of an episode whose turn has ended; evict parked episodes if the claims outgrow the cache."""
        use, grown = self._uses[claim.lane], tokens - claim.tokens
        growth = max(0, grown)  # a branch may make an episode shorter, but no turn gives room to others
        self._turn = growth if self._turn is None else self._turn + (1 - MEMORY) * (growth - self._turn)
        use.tokens += grown
        claim.tokens, claim.stamp = tokens, next(self._stamp)
        heapq.heappush(use.parked, (tokens, claim.stamp, claim))
        if len(use.parked) > 4 * use.claims + 64:  # most entries of the heap are outdated
            use.parked = [entry for entry in use.parked if entry[1] == entry[2].stamp]
            heapq.heapify(use.parked)
        while use.parked and use.claims > 1 and use.tokens + self._turn * use.claims > use.capacity:
            _, stamp, smallest = heapq.heappop(use.parked)
            if smallest.stamp == stamp:
                self.evicted += 1
                self._drop(smallest)

    def _drop(self, claim: CacheClaim) -> None:
        del self._claims[claim.episode]
        use, claim.stamp = self._uses[claim.lane], 0
        use.claims -= 1
        use.tokens -= claim.tokens

    def _forget_engine(self, lane: EngineSlots) -> None:
        """Drop the claims on an engine that serves no more requests, and let its waiting turns be admitted again."""
        use = self._uses.get(lane)
        if use is None:
            return
        for claim in [claim for claim in self._claims.values() if claim.lane is lane]:
            self._drop(claim)
        for turn, ticket in use.returning:
            heapq.heappush(self._queue, (turn, ticket))
        use.returning.clear()
