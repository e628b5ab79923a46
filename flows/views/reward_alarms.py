"""Finds signs of reward hacking in the metrics of a run's versions, for each domain.

    part     the reward rises, the accuracy does not, and only one of several reward parts rises
    length   the responses become much longer or much shorter

The mean of the newest `ENDS` versions is compared with the mean of the first `ENDS` of the newest `SPAN` versions. An
alarm is a reason to read responses, and no proof: no decision of a run depends on an alarm. The metrics come from the
run's log, so that a live view, a summary and a resumed run show the same alarms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.rollout.evaluation import safe_name

SPAN, ENDS, LEAST = 100, 10, 30  # versions: compared, averaged at each end, and needed for an alarm
REWARD_RISE = 0.1  # smallest rise of the reward
ACCURACY_RISE = 0.02  # largest rise of the accuracy that counts as none
PART_SHARE = 0.9  # smallest share of one part in the rises of all parts
ROOM = 0.05  # a part whose mean is nearer to its best value (1, or 0 for a penalty) cannot rise
LENGTH_FACTOR, LENGTH_TOKENS = 2.0, 16.0  # smallest change of the mean response length: factor, and tokens
SHOWN_PARTS = 8  # largest number of a domain's reward parts in tables and charts
SUM = "answer"  # part that a penalty of the form or of the length adds: the value before the penalty
PENALTIES = ("format", "length_penalty")


@dataclass(frozen=True, slots=True)
class Ends:
    """The mean of a metric over the first and over the last versions of a series."""

    first: float
    last: float

    @property
    def rise(self) -> float:
        """The difference of the two means."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class RewardAlarm:
    """A sign of reward hacking. `part` is the reward part that rose alone; "" for a change of the length. `first` and
    `last` are the first and the last version of the compared versions.
    """

    kind: Literal["part", "length"]
    domain: str
    part: str
    first: int
    last: int
    words: str

    @property
    def headline(self) -> str:
        """The alarm without figures, which stays the same while versions are added."""
        what = f"only the reward part {self.part!r} rises" if self.kind == "part" else "the response length drifts"
        return f"possible reward hacking in {self.domain}: {what}"

    @property
    def sentence(self) -> str:
        """The alarm as a sentence."""
        return f"{self.domain}, versions {self.first} to {self.last}: {self.words}"


def find_alarms(versions: Sequence[PolicyVersion], domains: Collection[str]) -> list[RewardAlarm]:
    """Return the alarms at the newest of these consecutive versions."""
    compared = [version for version in versions if version.number > 0][-SPAN:]
    if len(compared) < LEAST:
        return []
    return [
        RewardAlarm(kind, domain, part, compared[0].number, compared[-1].number, words)
        for domain in domains
        for kind, part, words in _find_in_domain(compared, domain, list(domains))
    ]


def scan_alarms(versions: Sequence[PolicyVersion], domains: Collection[str]) -> list[RewardAlarm]:
    """Return the alarms of a whole run: of each kind, domain and part the newest one."""
    found: dict[tuple[str, str, str], RewardAlarm] = {}
    trained = [version for version in versions if version.number > 0]
    for end in sorted({*range(LEAST, len(trained), ENDS), len(trained)}):
        for alarm in find_alarms(trained[max(0, end - SPAN) : end], domains):
            found[alarm.kind, alarm.domain, alarm.part] = alarm
    return list(found.values())


def _find_in_domain(
    versions: Sequence[PolicyVersion], domain: str, domains: Sequence[str]
) -> Iterator[tuple[Literal["part", "length"], str, str]]:
    of_domain = f"_{safe_name(domain)}" if len(domains) > 1 else ""
    reward, accuracy, length = (
        _measure(versions, f"{name}{of_domain}") for name in ("reward", "accuracy", "response_length")
    )
    if reward and accuracy and reward.rise >= REWARD_RISE and accuracy.rise <= ACCURACY_RISE:
        parts = {
            part: ends
            for part, name in list_parts(versions, domain, domains).items()
            if (ends := _measure(versions, name))
        }
        if part := find_lone_part(reward, parts):
            yield (
                "part",
                part,
                (
                    f"the reward rose from {reward.first:.2f} to {reward.last:.2f} by its part {part!r} alone, and the "
                    f"accuracy did not rise ({accuracy.first:.2f} to {accuracy.last:.2f}); read responses (`rollflow "
                    "inspect`): they may please this part only"
                ),
            )
    if length and has_drifted(length):
        yield (
            "length",
            "",
            (
                f"the mean response length changed from {length.first:.0f} to {length.last:.0f} tokens; read responses "
                "(`rollflow inspect`): the reward may depend on the length"
            ),
        )


def find_lone_part(reward: Ends, parts: Mapping[str, Ends]) -> str:
    """Return the part that rose alone while another part could have risen, too; "" if there is none."""
    own = {part: ends for part, ends in parts.items() if not _is_sum(part, reward, parts)}
    rises = {part: max(0.0, ends.rise) for part, ends in own.items()}
    if not (total := sum(rises.values())):
        return ""
    best = max(rises, key=rises.__getitem__)
    others_can_rise = any(_has_room(part, ends) for part, ends in own.items() if part != best)
    return best if others_can_rise and rises[best] >= PART_SHARE * total else ""


def has_drifted(length: Ends) -> bool:
    """Return whether the mean length has changed by `LENGTH_FACTOR` or more, and by `LENGTH_TOKENS` or more."""
    shorter, longer = sorted((length.first, length.last))
    return longer - shorter >= LENGTH_TOKENS and longer >= LENGTH_FACTOR * shorter


def list_parts(versions: Sequence[PolicyVersion], domain: str, domains: Collection[str]) -> dict[str, str]:
    """Return the reward parts of a domain with the names of their metrics; parts of parts are left out."""
    prefix = f"part_{safe_name(domain)}_"
    longer = [other for name in domains if (other := f"part_{safe_name(name)}_").startswith(prefix) and other != prefix]
    names = dict.fromkeys(name for version in versions for name in version.metrics if name.startswith(prefix))
    return {
        part: name
        for name in names
        if "." not in (part := name.removeprefix(prefix)) and not any(map(name.startswith, longer))
    }


def _is_sum(part: str, reward: Ends, parts: Mapping[str, Ends]) -> bool:
    """Return whether a part is the sum of the others, which `finish_score` records beside the penalties."""
    penalties = [parts[name] for name in PENALTIES if name in parts]
    if part != SUM or not penalties or len(parts) <= 1 + len(penalties):
        return False
    added = [parts[part], *penalties]
    gaps = (sum(one.first for one in added) - reward.first, sum(one.last for one in added) - reward.last)
    return max(map(abs, gaps)) < 1e-5


def _has_room(part: str, ends: Ends) -> bool:
    return ends.last < (0.0 if part in PENALTIES else 1.0) - ROOM


def _measure(versions: Sequence[PolicyVersion], name: str) -> Ends | None:
    """Return the means of a metric at both ends; None if fewer than `LEAST` versions have it."""
    values = [version.metrics[name] for version in versions if name in version.metrics]
    if len(values) < LEAST:
        return None
    return Ends(sum(values[:ENDS]) / ENDS, sum(values[-ENDS:]) / ENDS)
