"""The errors of rollflow. Each is named for what its catcher does.

Every error takes one string, so it can be pickled and sent between processes.
"""


class RollflowError(Exception):
    """The base class of all errors that rollflow raises on purpose."""


class Conflict(RollflowError):
    """Another process has committed this name first: read again, then retry or stop."""


class Missing(RollflowError):
    """No object of that name is in the store."""


class Stale(RollflowError):
    """A group is older than alpha allows: count it, skip it and issue its prompt again."""


class Corrupt(RollflowError):
    """Stored bytes differ from the committed ones: quarantine them, never train on them."""


class EngineFailed(RollflowError):
    """An engine died or generates with wrong weights: stop it and send its requests to another engine."""


class RankFailed(RollflowError):
    """A rank of the learner died or hangs, so all ranks have ended: restart the learner from storage."""


class Unreachable(RollflowError):
    """A service did not answer in time; the message names the service, the address and the wait."""


class StoreFailed(RollflowError):
    """The store refuses writes (full, over quota, read-only). Nothing was committed: fix the store, then resume."""


class NotFinite(RollflowError):
    """A train step gave a NaN or an infinity, and nothing was published: stop, or train on another batch."""


class ConfigError(RollflowError):
    """The user must change something. The message names the key, its value and the fix (exit code 2)."""
