"""A scorer that sends each response to the place with the smallest load. A *place* is the run's own scorer or a helper.

    submit() --> queue of each scorer --the place with the smallest load--> home: the scorer of the reward actor
                       ^                                              `---> a helper, perhaps on another node
                       `------- the responses of a lost helper <-----------'

- Every response gets exactly one score, although helpers may be lost at any time.
- A place gets only as many responses as it can probably score within `AHEAD_SECONDS`; other responses wait in the
  queue.
- Only responses of a lost helper are sent again; after two lost helpers, the run's own scorer scores the response.
- Responses for a judge or a reward model are never sent to helpers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage
from rollflow.tasks.scorers.routed import RoutedScorer
from rollflow.tasks.scorers.spread.members import PlaceLost

AHEAD_SECONDS = 1.0  # largest estimated time, in seconds, until a place begins to score a response that it gets
LEAST_AHEAD, MOST_AHEAD = 2, 256  # smallest and largest number of responses that a place gets for each of its slots
MOST_LOSSES = 2  # number of lost helpers after which only the run's own scorer scores a response

Submit = Callable[[Sequence[ScoreRequest]], list["asyncio.Future[Score]"]]


class ScoringPlace:
    """The run's own scorer or a helper, to which responses are sent. `loads` maps names of scorers to the number of the
    place's responses that have no score yet.

    A place gets no more responses if it is not `open`. `lost` is set when the place can return no more scores.
    """

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.loads = Counter[str]()
        self.open = True
        self.lost = asyncio.Event()
        self._pace = dict[str, float]()  # moving average of the seconds for scoring one response, by scorer

    @property
    def idle(self) -> bool:
        """True if every response of the place has a score."""
        return not self.loads.total()

    def count_room(self, scorer: str, slots: int) -> int:
        """Return how many more responses the place may get, if it scores `slots` responses at the same time."""
        ahead = AHEAD_SECONDS / max(self._pace.get(scorer, AHEAD_SECONDS), AHEAD_SECONDS / MOST_AHEAD)
        return int(slots * max(ahead, LEAST_AHEAD)) - self.loads[scorer]

    def note_score(self, scorer: str, score: Score) -> None:
        """Include the time of a score in the average that `count_room` uses."""
        pace = self._pace.get(scorer, AHEAD_SECONDS)
        self._pace[scorer] = pace + (score.seconds - pace) / 4


def choose_place(places: Iterable[ScoringPlace], scorer: str, slots: int) -> ScoringPlace | None:
    """Return the open place with the smallest load, or None if no place has room. Of places with equal loads, return
    the first.
    """
    free = [place for place in places if place.open and place.count_room(scorer, slots) > 0]
    return min(free, key=lambda place: place.loads[scorer], default=None)


@dataclass(eq=False, slots=True)
class SpreadJob:
    """A response that waits for its score; `losses` counts the helpers that were lost while they scored it."""

    request: ScoreRequest
    arrival: int
    future: asyncio.Future[Score]
    losses: int = 0


class SpreadScorer(Scorer):
    """Spreads responses over the run's own scorer and helpers."""

    def __init__(self, own: Scorer, slots: Mapping[str, int]) -> None:
        """Create the scorer without helpers. `slots` maps each scorer that helpers support to the number of responses
        that one place scores at the same time.
        """
        self._own, self._slots = own, dict(slots)
        self.home = ScoringPlace(own.submit)
        self._helpers = list[ScoringPlace]()
        self._queues: dict[str, list[tuple[int, SpreadJob]]] = {name: [] for name in slots}  # sorted by arrival
        # queues of responses that only the run's own scorer may score; such a response must not delay responses for
        # helpers
        self._home_queues: dict[str, list[tuple[int, SpreadJob]]] = {name: [] for name in slots}
        self._unscored = Counter[str]()  # responses of each scorer that have no score yet
        self._arrivals = itertools.count()
        self._helped = ScorerUsage()

    @property
    def usage(self) -> ScorerUsage:  # type: ignore[override]  # the sum is read only
        """The counters of the run's own scorer, plus the numbers of scores and time-outs of helpers; busy time is the
        own scorer's.
        """
        own, helped = self._own.usage, self._helped
        return ScorerUsage(own.scored + helped.scored, own.timeouts + helped.timeouts, own.busy_seconds)

    def count_wanted(self) -> int:
        """Return how many places, including the run's own scorer, the responses without a score would fill."""
        return max((math.ceil(self._unscored[name] / slots) for name, slots in self._slots.items()), default=1)

    def add(self, place: ScoringPlace) -> None:
        """Add a helper, which gets responses from the queue at once."""
        self._helpers.append(place)
        self.dispatch()

    def remove(self, place: ScoringPlace) -> None:
        """Remove a helper; its responses without a score fail with `PlaceLost`."""
        place.open = False
        if place in self._helpers:
            self._helpers.remove(place)

    async def start(self) -> None:
        """Start the run's own scorer."""
        await self._own.start()

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score the responses in `requests`; return a future of each score, in the order of the responses."""
        at_home = iter(self._own.submit([request for request in requests if request.scorer not in self._slots]))
        found = [self._queue(request) if request.scorer in self._slots else next(at_home) for request in requests]
        self.dispatch()
        return found

    def _queue(self, request: ScoreRequest) -> asyncio.Future[Score]:
        job = SpreadJob(request, next(self._arrivals), asyncio.get_running_loop().create_future())
        self._unscored[request.scorer] += 1
        self._put(job)
        return job.future

    def _put(self, job: SpreadJob) -> None:
        queues = self._queues if job.losses < MOST_LOSSES else self._home_queues
        heapq.heappush(queues[job.request.scorer], (job.arrival, job))

    def dispatch(self) -> None:
        """Send responses from the queues to places, as long as a place has room."""
        for name, slots in self._slots.items():
            chosen = dict[ScoringPlace, list[SpreadJob]]()
            queues = (self._home_queues[name], [self.home]), (self._queues[name], [self.home, *self._helpers])
            for queue, places in queues:
                while queue and (place := choose_place(places, name, slots)):
                    place.loads[name] += 1
                    chosen.setdefault(place, []).append(heapq.heappop(queue)[1])
            for place, jobs in chosen.items():
                for job, future in zip(jobs, place.submit([job.request for job in jobs]), strict=True):
                    future.add_done_callback(partial(self._settle, place, job))

    def _settle(self, place: ScoringPlace, job: SpreadJob, done: asyncio.Future[Score]) -> None:
        """Return the score of a response to its caller, or queue the response again if its helper was lost."""
        name = job.request.scorer
        place.loads[name] -= 1
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if place is not self.home and isinstance(error, PlaceLost | asyncio.CancelledError):
            self.remove(place)
            place.lost.set()
            job.losses += 1
            self._put(job)
        else:
            self._unscored[name] -= 1
            self._pass_on(place, job, error, done)
        self.dispatch()

    def _pass_on(
        self, place: ScoringPlace, job: SpreadJob, error: BaseException | None, done: asyncio.Future[Score]
    ) -> None:
        if error is None:
            place.note_score(job.request.scorer, done.result())
            if place is not self.home:
                self._helped.scored += 1
                self._helped.timeouts += done.result().outcome is Outcome.TIMEOUT
        if job.future.done():
            return
        if done.cancelled():
            job.future.cancel()
        elif error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(done.result())

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close the run's own scorer.

        Raises:
            ConfigError: the run's own scorer can score no response at all.
        """
        await self._own.serve(finished)

    async def close(self) -> None:
        """Close the run's own scorer."""
        await self._own.close()


def list_slots(scorer: Scorer, names: Iterable[str]) -> dict[str, int]:
    """Map each scorer with worker processes to the number of responses that it scores at the same time. `scorer` was
    built from the run's scorers; `names` are their names.
    """
    scorers = scorer.scorers if isinstance(scorer, RoutedScorer) else dict.fromkeys(names, scorer)
    return {name: one.slots for name, one in scorers.items() if one.slots}
