"""Defines the errors of rollflow. Each error class says what the caller must do, such as retry, skip or stop. The only
argument of each error is a string, so that errors can be pickled and sent between processes.
"""


class RollflowError(Exception):
    """The base class of all errors that rollflow raises on purpose."""


class Conflict(RollflowError):
    """An object of the same name already exists, or the log's rules refuse a log entry: read the run's state again,
    then retry or stop.
    """


class Missing(RollflowError):
    """The store contains no object of the requested name."""


class Stale(RollflowError):
    """A group of trajectories is older than `async_ratio` allows: skip the group, count it as stale, and issue its
    prompt again.
    """


class Corrupt(RollflowError):
    """The stored bytes of an object differ from the committed bytes: quarantine the object, and never train on the
    object."""


class EngineFailed(RollflowError):
    """An engine died or generates with wrong weights: stop the engine, and send its requests to another engine."""


class RankFailed(RollflowError):
    """A rank (process) of the learner died or hangs, so all ranks have ended: restart the learner from storage."""


class Unreachable(RollflowError):
    """A service did not answer in time; the message names the service, its address and the seconds waited."""


class StoreFailed(RollflowError):
    """The object store refuses writes, for example because the disk is full, over quota or read-only. The failed write
    committed nothing, so the user can fix the store and resume the run.
    """


class NotFinite(RollflowError):
    """A train step computed a NaN or an infinity, so no policy version was published: stop, or train on another
    batch."""


class ConfigError(RollflowError):
    """The user must change a key of the config or a setting of the system. The message of a `ConfigError` names the
    key, its value and the fix, and the command exits with code 2.
    """
