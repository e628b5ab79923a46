"""The few errors of rollflow, each named for what its catcher does about it.

All are picklable (one string argument), because they travel between processes as values.
"""


class RollflowError(Exception):
    """Base of every error rollflow raises on purpose."""


class Conflict(RollflowError):
    """Somebody else committed this name first: reread, then retry or stop."""


class Missing(RollflowError):
    """No object of that name is in the store."""


class Stale(RollflowError):
    """Older than alpha allows: count it, skip it, issue its prompt again."""


class Corrupt(RollflowError):
    """Bytes that are not what their commit says: quarantine, never train on them."""


class EngineFailed(RollflowError):
    """An engine died or generates under the wrong weights: stop it, take its requests elsewhere."""


class RankFailed(RollflowError):
    """A rank of a learner died or hangs, and the others ended with it: begin again from storage."""


class Unreachable(RollflowError):
    """A service did not answer in time; the message names the service, the address and the wait."""


class StoreFailed(RollflowError):
    """The store takes no more writes (full, over a quota, read-only): nothing was committed; clear it, then resume."""


class NotFinite(RollflowError):
    """A NaN or an infinity where a version is made: nothing is published. Stop, or train on another batch."""


class ConfigError(RollflowError):
    """A person must change something; the message names the key, the value and the cure (exit code 2)."""
