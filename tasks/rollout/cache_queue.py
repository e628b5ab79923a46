"""The cache queue: a request queue that admits an episode only if its tokens fit into the KV cache of an engine.

- An admitted episode has a *claim*: its tokens count as stored in the KV cache of one engine, and its turns run on this
  engine.
- Turns of episodes with a claim run before turns of other episodes.
- An episode keeps its claim while its environment works. If the cache becomes too small, episodes whose environments
  work lose their claims one after another. The episode with the fewest tokens is first, because its tokens cost least
  to compute again.
- An engine without claims admits any episode, so that an episode that is larger than the cache can run.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.slots import MEMORY, EngineSlots, SlotQueue, Ticket

# number of further turns of each episode for which a cache must have room before another episode is admitted
TURNS_AHEAD = 3


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """The size of the engines' KV caches, in tokens as the scheduler counts them."""

    capacity: int  # number of tokens that fit into the KV cache of one engine
    per_episode: int = 0  # places in the KV cache that each episode occupies in addition to one place for each token


@dataclass(eq=False, slots=True)
class CacheClaim:
    """The tokens that an episode occupies in the KV cache of one engine."""

    episode: str
    lane: EngineSlots
    tokens: int
    # number of the claim's entry in the heap of claims that may be evicted; 0 while a turn runs or waits
    stamp: int = 0


@dataclass(eq=False, slots=True)
class CacheUse:
    """The claims of episodes on the KV cache of one engine."""

    capacity: int
    claims: int = 0
    tokens: int = 0
    parked: list[tuple[int, int, CacheClaim]] = field(default_factory=list)  # heap: (tokens, stamp, claim)
    # heap of turns of episodes with a claim, which wait for a slot of this engine
    returning: list[tuple[tuple[float, int], Ticket]] = field(default_factory=list)

    def fits(self, tokens: int, turn: float) -> bool:
        """Return whether the cache has room for another episode and `TURNS_AHEAD` more turns of `turn` tokens per
        episode.
        """
        return not self.claims or self.tokens + tokens + TURNS_AHEAD * turn * (self.claims + 1) <= self.capacity


class CacheQueue(SlotQueue):
    """A request queue that admits an episode only if its tokens fit into the KV cache of an engine."""

    def __init__(self, limits: CacheLimits, routing: Routing, replacement_seconds: float) -> None:
        super().__init__(routing, replacement_seconds)
        self._limits = limits
        self._claims: dict[str, CacheClaim] = {}
        self._uses: dict[EngineSlots, CacheUse] = {}
        self._stamp = count(1)
        self._turn: float | None = None  # moving average of the number of tokens that a turn adds to an episode
        self.evicted = 0  # number of claims that were evicted from a cache

    @property
    def admitted(self) -> int:
        """Number of episodes with a claim on the KV cache of an engine."""
        return len(self._claims)

    @property
    def uses(self) -> Mapping[EngineSlots, CacheUse]:
        """The claims of episodes on the KV cache of each engine."""
        return self._uses

    def put(self, place: int, lane: EngineSlots) -> EngineSlots | None:
        """Register an engine, as `SlotQueue.put` specifies."""
        self._uses[lane] = CacheUse(self._limits.capacity)
        return super().put(place, lane)

    def remove(self, lane: EngineSlots) -> None:
        """Remove an engine, as `SlotQueue.remove` specifies; its episodes are admitted again on other engines."""
        super().remove(lane)
        self._forget_engine(lane)
        self._dispatch()

    async def take(self, ticket: Ticket) -> EngineSlots | None:
        """Wait for a slot of the engine on which the episode has a claim, or of an engine that admits the episode."""
        claim = self._claims.get(ticket.episode)
        if claim is None:
            return await super().take(ticket)
        claim.stamp = 0
        ticket.wait()
        heapq.heappush(self._uses[claim.lane].returning, (ticket.turn, ticket))
        self._return_turns(claim.lane)
        return await self._wait(ticket)

    def release(self, lane: EngineSlots, ticket: Ticket) -> None:
        """Free the slot of a finished request, and allow the eviction of the request's episode."""
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
        """Record the size of an episode whose turn has ended; evict waiting episodes if the claims outgrow the
        cache."""
        use, grown = self._uses[claim.lane], tokens - claim.tokens
        growth = max(0, grown)  # a shorter new branch counts as 0, so that the moving average never becomes negative
        self._turn = growth if self._turn is None else self._turn + (1 - MEMORY) * (growth - self._turn)
        use.tokens += grown
        claim.tokens, claim.stamp = tokens, next(self._stamp)
        heapq.heappush(use.parked, (tokens, claim.stamp, claim))
        if len(use.parked) > 4 * use.claims + 64:  # The heap is rebuilt when most of its entries are outdated.
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
        """Drop the claims on an engine that no longer serves requests; the waiting turns are admitted to other
        engines."""
        use = self._uses.get(lane)
        if use is None:
            return
        for claim in [claim for claim in self._claims.values() if claim.lane is lane]:
            self._drop(claim)
        for turn, ticket in use.returning:
            heapq.heappush(self._queue, (turn, ticket))
        use.returning.clear()
