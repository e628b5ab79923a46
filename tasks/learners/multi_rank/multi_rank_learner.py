"""A learner of several ranks (processes). The first rank implements the interface `Learner` and sends commands to the
other ranks.

    learner actor --> first rank (in this process) --orders--> rank 1, rank 2, ...
                            +---- sums over all ranks (`ranks`) ----+

- The stored and published weights are those of the first rank. Before a train step, the first rank sends its weights
  and state to the other ranks if theirs may differ, for example after `load`.
- If a rank ends or does not answer for `train.rank_seconds` seconds, the error `RankFailed` names the rank. All ranks
  then end, and a new learner starts from storage.
- No rank changes a stored tensor before `settle` has returned on the first rank.
- No rank outlives the process of the first rank.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError, NotFinite, RankFailed, StoreFailed, Unreachable
from rollflow.storage.objects.base import Data, ObjectStore, split_buffers
from rollflow.storage.records import StoredObject
from rollflow.tasks.learners.base import LearnerStart, WaitForPublish, no_wait
from rollflow.tasks.learners.checkpoint.sharded_files import GatheredFiles
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks, serve_store
from rollflow.tasks.learners.distributed.publish_barrier import StepStopped, wait_published
from rollflow.tasks.learners.distributed.rank_gpus import check_gpus
from rollflow.tasks.learners.distributed.rank_protocol import (
    NEAR,
    ComputeLogprobs,
    FindNonfinite,
    LoadState,
    Meeting,
    Order,
    Pipes,
    SendFile,
    ShardModel,
    TrainStep,
    TryModel,
)
from rollflow.tasks.learners.distributed.ranks import RankLost, raise_lost
from rollflow.tasks.learners.distributed.staging import Staging
from rollflow.tasks.learners.multi_rank.rank_process import (
    LOST,
    MEET,
    broadcast_data,
    failed_key,
    gone_key,
    learner_of,
    ready_key,
    run_rank,
)
from rollflow.tasks.learners.sharding.sharded_learner import ShardedLearner
from rollflow.tasks.runtime.actor_warnings import open_socket

IMPORTS = "rollflow.tasks.learners.multi_rank.rank_imports"  # module that is imported before ranks are forked
READY_SECONDS = 300.0  # longest time, in seconds, that a rank may take to import modules and to read the model
GRACE_SECONDS = 5.0  # longest time, in seconds, in which ranks that lost contact with another rank may end themselves
POLL_SECONDS = 0.05


class MultiRankLearner:
    """A learner with several ranks (processes), of which this process is the first."""

    def __init__(self, config: TrainBase, start: LearnerStart) -> None:
        """Start the other ranks, and create the learner of the first rank.

        Raises:
            ConfigError: there are fewer GPUs than ranks, or the configuration or the model is invalid with any number
                of ranks.
        """
        if start.ranks == NEAR:
            check_gpus(config.ranks)
        kind = learner_of(config)
        self._others = OtherRanks(config, start)
        weakref.finalize(self, self._others.end)
        self._own = kind.create(config, start)
        self._ranks = self._own.ranks = self._others.meet()
        self._alike = False  # True if the other ranks have the same weights and state as the first rank
        self._turn = Lock()  # acquired while a file is gathered, so that all ranks gather files in the same order

    @property
    def model(self) -> Any:
        """The first rank's model."""
        return self._own.model

    def step(self, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> Mapping[str, float]:
        """See `Learner`.

        Raises:
            RankFailed: a rank ended or hangs; after this error, the learner is unusable. The other methods of a
                sharded learner raise `RankFailed`, too.
        """
        if not self._alike:
            # The stored tensors are sent to the other ranks, so the previous policy version must be stored first.
            settle()
        with self._guard_ranks(f"version {version + 1} was trained"):
            if not self._alike:
                self._share_state()
            data = batch.to_pieces()
            self._others.order(TrainStep(version, _count_bytes(data)))
            broadcast_data(self._ranks, data)
            return self._own.step(batch, version, partial(wait_published, self._ranks, settle))

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """See `Learner`."""
        with self._order_sharded(ComputeLogprobs(tuple(tokens)), "log-probabilities were computed"):
            return self._own.logprobs(tokens)

    def first_nonfinite(self) -> str | None:
        """See `Learner`."""
        with self._order_sharded(FindNonfinite(), "the weights were checked"):
            return self._own.first_nonfinite()

    def check_ranks(self) -> None:
        """See `Learner`."""
        with self._guard_ranks("the next batch was waited for"):
            self._ranks.check()

    def weights(self) -> Mapping[str, Data]:
        """See `Learner`."""
        return self._gather_files(self._own.weights())

    def state(self) -> Mapping[str, Data]:
        """See `Learner`."""
        return self._gather_files(self._own.state())

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """See `Learner`."""
        if not self._own.can_shard:
            self._own.load(weights, state)
            self._alike = False
            return
        self._own.check(weights, state)
        with self._guard_ranks("a version was loaded"):
            self._load_all(weights, state)

    @property
    def _sharded(self) -> bool:
        return self._own.sharded

    def _gather_files(self, files: Mapping[str, Data]) -> Mapping[str, Data]:
        """Return the first rank's files. A file of a sharded learner is gathered from all ranks when it is read."""
        own = self._own
        if not isinstance(own, ShardedLearner) or not own.sharded:
            return files
        after = self._others.ordered

        def gather(ask: SendFile) -> Data:
            with self._guard_ranks(f"{ask.file} was gathered"), self._turn:
                self._others.ask(replace(ask, after=after))
                return own.gather(ask.file, ask.to)

        def put(file: str, store: ObjectStore, path: str) -> StoredObject:
            with self._guard_ranks(f"{file} was stored"):
                return staging.put(file, store, path)

        staging = Staging(self._ranks, own.sizes(), own.shard_bytes, gather)
        return GatheredFiles(files, lambda file: gather(SendFile(file)), put, staging.movers)

    @contextmanager
    def _order_sharded(self, order: Order, what: str) -> Iterator[None]:
        """Run a `with` block on the first rank; if the learner is sharded, first send `order` to the other ranks."""
        if not self._sharded:
            yield
            return
        with self._guard_ranks(what):
            self._others.order(order)
            yield

    @contextmanager
    def _guard_ranks(self, what: str) -> Iterator[None]:
        """Run a `with` block in which all ranks work together. All ranks are ended if the block raises an error that a
        failed rank may have caused."""
        try:
            with raise_lost():
                yield
        except NotFinite:
            raise  # all ranks raise the same error, and can continue training
        except StepStopped as stopped:
            raise stopped.error or stopped from None  # all ranks ended the train step, and can continue training
        except (StoreFailed, Unreachable, ConfigError):
            raise  # the object store failed, but no rank failed
        except RankLost as error:
            raise self._others.fail(what, error) from error
        except BaseException:
            self._others.end()
            raise

    def _share_state(self) -> None:
        """Send the first rank's weights and learner state to the other ranks."""
        weights, state = self._own.weights(), self._own.state()
        if self._own.can_shard:
            self._load_all(weights, state)
        else:
            self._send(weights, state)
        self._alike = True

    def _load_all(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Load the files of a policy version on all ranks, one file after the other. A rank of a sharded learner keeps
        only its shards."""
        if not self._sharded:
            self._others.order(ShardModel())
            self._own.shard()
        self._send(weights, state)
        self._own.take(weights.items(), state.items())
        if self._own.blank:
            self._others.order(TryModel())
            self._own.try_model()
        self._alike = True

    def _send(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Make the other ranks load the weight files `weights` and the state files `state`."""
        sizes, rest = ({name: _count_bytes(data) for name, data in part.items()} for part in (weights, state))
        self._others.order(LoadState(sizes, rest, self._own.sharing))
        for data in chain(weights.values(), state.values()):
            broadcast_data(self._ranks, data)


class ForkedRank:
    """A rank that runs in a forked process on this machine."""

    def __init__(self, config: TrainBase, start: LearnerStart, rank: int, meeting: Meeting) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([IMPORTS])
        pairs = context.Pipe(), context.Pipe()
        self.pipes, theirs = (Pipes(*ends) for ends in zip(*pairs, strict=True))
        given = rank, meeting, theirs, config, start, open_socket()
        self.process = context.Process(target=run_rank, args=given, daemon=True)
        self.process.start()
        theirs.close()

    def read_exit(self) -> int | None:
        """See `StartedRank`."""
        return self.process.exitcode

    def end(self) -> None:
        """See `StartedRank`."""
        self.process.kill()
        self.pipes.close()


class OtherRanks:
    """The processes of all ranks except the first: starts them, sends commands to them and ends them."""

    def __init__(self, config: TrainBase, start: LearnerStart) -> None:
        self._config, self._host = config, start.ranks.host
        self._store = serve_store(self._host)
        self.ordered = 0  # number of commands that the first rank has sent
        self._ranks: GlooRanks | None = None  # the first rank's process group; None until all ranks have started
        self._failed: RankFailed | None = None
        self._failing = Lock()
        meeting, begin = Meeting(self._host, self._store.port), start.ranks.start or partial(ForkedRank, config, start)
        self._started = {rank: begin(rank, meeting) for rank in range(1, config.ranks)}

    def meet(self) -> GlooRanks:
        """Wait until all ranks have started; return the first rank's connection to the other ranks."""
        deadline = time.monotonic() + READY_SECONDS
        try:
            while late := [rank for rank in self._started if not self._store.check([ready_key(rank)])]:
                self._check()
                if time.monotonic() > deadline:
                    raise RankLost(f"{self._name_rank(late[0])} did not start within {READY_SECONDS:g} s")
                time.sleep(POLL_SECONDS)
            self._store.set(MEET, "")
            count, seconds = self._config.ranks, self._config.rank_seconds
            self._ranks = GlooRanks(self._store, 0, count, seconds, self._check, host=self._host)
            return self._ranks
        except (RankLost, RuntimeError) as error:
            raise self.fail(when="the ranks started", error=error) from error

    def order(self, order: Order) -> None:
        """Send a command to all other ranks."""
        self.ordered += 1
        _send([one.pipes.orders for one in self._started.values()], order)

    def ask(self, ask: SendFile) -> None:
        """Make all other ranks send their shards of a file, even while they execute a command."""
        _send([one.pipes.asked for one in self._started.values()], ask)

    def fail(self, when: str, error: Exception) -> RankFailed:
        """End all ranks, and return an error that names the failed rank. All later calls of `fail` return the same
        error."""
        with self._failing:
            if self._failed is None:
                self._failed = RankFailed(
                    f"{self._find_fault(error)} while {when}; all ranks end and restart from storage"
                )
                self.end()
            return self._failed

    def _find_fault(self, error: Exception) -> str:
        """Return a sentence that says which rank failed and how. `_find_fault` waits up to `GRACE_SECONDS` seconds,
        until ranks that only lost contact with another rank have ended by themselves.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(one.read_exit() is None for one in self._started.values()):
            time.sleep(POLL_SECONDS)
        ended = {rank: one.read_exit() for rank, one in self._started.items()}
        for rank, how in ended.items():
            if how is not None and how != LOST and not self._store.check([gone_key(rank)]):
                return self._describe_end(rank, how)
        silent = getattr(error, "rank", None)
        alive = [rank for rank, how in ended.items() if how is None] if silent is None else [silent]
        if self._ranks and (late := self._ranks.find_late() or alive):
            return (
                f"{self._name_rank(late[0])} did not reach the other ranks within {self._config.rank_seconds:g} "
                "s (train.rank_seconds)"
            )
        return str(error).partition("\n")[0]

    def end(self) -> None:
        """Kill all other ranks."""
        for one in self._started.values():
            one.end()

    def _check(self) -> None:
        if ended := [rank for rank, one in self._started.items() if one.read_exit() is not None]:
            raise RankLost(f"{self._name_rank(ended[0])} ended")

    def _describe_end(self, rank: int, how: int | str) -> str:
        """Describe how a rank ended."""
        if self._store.check([failed_key(rank)]):
            return f"{self._name_rank(rank)} failed ({self._store.get(failed_key(rank)).decode()})"
        if isinstance(how, int):
            how = f"was killed by {signal.Signals(-how).name}" if how < 0 else f"ended with code {how}"
        return f"{self._name_rank(rank)} {how}"

    def _name_rank(self, rank: int) -> str:
        return f"rank {rank} of {self._config.ranks}"


def _send(to: Sequence[Connection], what: object) -> None:
    """Send an object to other ranks by pipes; raise `RankLost` if one of their processes has ended."""
    try:
        for pipe in to:
            pipe.send(what)
    except OSError as error:
        raise RankLost(str(error)) from error


def _count_bytes(data: Data) -> int:
    """Return the number of bytes of a file."""
    return sum(len(piece) for piece in split_buffers(data))
