"""Finds signs of reward hacking in the metrics of each prompt domain of a run. Also finds scorers whose verdicts change
when responses are judged again.

    part     the reward rises, the accuracy does not, and only one of several reward parts rises
    length   the responses become much longer or much shorter
    flip     responses get another verdict when they are judged again

The mean of the newest `ENDS` versions is compared with the mean of the first `ENDS` of the newest `SPAN` versions. An
alarm is a reason to read responses, and not a proof: no decision of a run depends on an alarm. The metrics come from
the run's log, so that a live view, a summary and a resumed run show the same alarms.

A run judges a share of its responses a second time (`reward.second_verdict_share`). A scorer raises an alarm if its
share of flips is above `FLIP_LIMIT` even at the lower end of a confidence interval, so that one flip raises no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.rollout.evaluation import safe_name

# Numbers of policy versions: the newest SPAN versions are examined, the means of their first and last ENDS versions are
# compared, and an alarm needs at least LEAST versions.
SPAN, ENDS, LEAST = 100, 10, 30
REWARD_RISE = 0.1  # smallest rise of the reward for an alarm
ACCURACY_RISE = 0.02  # largest rise of the accuracy that is treated as no rise
# Smallest share of the reward's total rise that one part of the reward must have to count as rising alone.
PART_SHARE = 0.9
ROOM = 0.05  # A reward part cannot rise if its mean is nearer than this to its best value (1, or 0 for a penalty).
LENGTH_FACTOR, LENGTH_TOKENS = 2.0, 16.0  # Smallest change of the response length for an alarm.
SHOWN_PARTS = 8  # Largest number of a prompt domain's reward parts that tables and charts show.
SUM = "answer"  # Name of the reward part that has the score before penalties for form or length.
PENALTIES = ("format", "length_penalty")
LEAST_VERDICTS = 20  # a scorer with fewer second verdicts raises no alarm
FLIP_LIMIT = 0.02  # largest share of flipped verdicts that raises no alarm
Z = 2.576  # quantile of the normal distribution for an interval of 99%, because the counts are looked at repeatedly


@dataclass(frozen=True, slots=True)
class Ends:
    """The mean of a metric over the first and over the last policy versions of a series."""

    first: float
    last: float

    @property
    def rise(self) -> float:
        """The mean over the last policy versions minus the mean over the first ones."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class RewardAlarm:
    """A sign of reward hacking. `part` is the part of the reward that rose alone, or "" if the response length changed.
    `first` and `last` are the numbers of the first and the last compared policy version.
    """

    kind: Literal["part", "length"]
    domain: str
    part: str
    first: int
    last: int
    words: str

    @property
    def headline(self) -> str:
        """The alarm as text without numbers. The text stays the same while policy versions are added."""
        what = f"only the reward part {self.part!r} rises" if self.kind == "part" else "the response length drifts"
        return f"possible reward hacking in {self.domain}: {what}"

    @property
    def sentence(self) -> str:
        """The alarm as a sentence."""
        return f"{self.domain}, versions {self.first} to {self.last}: {self.words}"


def find_alarms(versions: Sequence[PolicyVersion], domains: Collection[str]) -> list[RewardAlarm]:
    """Return the signs of reward hacking (alarms) at the newest of these consecutive policy versions."""
    compared = [version for version in versions if version.number > 0][-SPAN:]
    if len(compared) < LEAST:
        return []
    return [
        RewardAlarm(kind, domain, part, compared[0].number, compared[-1].number, words)
        for domain in domains
        for kind, part, words in _find_in_domain(compared, domain, list(domains))
    ]


def scan_alarms(versions: Sequence[PolicyVersion], domains: Collection[str]) -> list[RewardAlarm]:
    """Return the signs of reward hacking (alarms) in a whole run. Only the newest alarm of each kind, prompt domain and
    reward part is returned.
    """
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
    """Return the part of the reward that rose alone although another part could have risen, too. Return "" if there is
    none.
    """
    own = {part: ends for part, ends in parts.items() if not _is_sum(part, reward, parts)}
    rises = {part: max(0.0, ends.rise) for part, ends in own.items()}
    if not (total := sum(rises.values())):
        return ""
    best = max(rises, key=rises.__getitem__)
    others_can_rise = any(_has_room(part, ends) for part, ends in own.items() if part != best)
    return best if others_can_rise and rises[best] >= PART_SHARE * total else ""


def has_drifted(length: Ends) -> bool:
    """Return whether the mean response length has changed at least by the factor `LENGTH_FACTOR` and by `LENGTH_TOKENS`
    tokens.
    """
    shorter, longer = sorted((length.first, length.last))
    return longer - shorter >= LENGTH_TOKENS and longer >= LENGTH_FACTOR * shorter


def list_parts(versions: Sequence[PolicyVersion], domain: str, domains: Collection[str]) -> dict[str, str]:
    """Return the parts of the reward of a prompt domain, with the names of their metrics. Parts of the reward that
    belong to another part are left out.
    """
    prefix = f"part_{safe_name(domain)}_"
    longer = [other for name in domains if (other := f"part_{safe_name(name)}_").startswith(prefix) and other != prefix]
    names = dict.fromkeys(name for version in versions for name in version.metrics if name.startswith(prefix))
    return {
        part: name
        for name in names
        if "." not in (part := name.removeprefix(prefix)) and not any(map(name.startswith, longer))
    }


def _is_sum(part: str, reward: Ends, parts: Mapping[str, Ends]) -> bool:
    """Return whether a part of the reward is the sum of the other parts. `finish_score` records such a sum if there are
    penalties.
    """
    penalties = [parts[name] for name in PENALTIES if name in parts]
    if part != SUM or not penalties or len(parts) <= 1 + len(penalties):
        return False
    added = [parts[part], *penalties]
    gaps = (sum(one.first for one in added) - reward.first, sum(one.last for one in added) - reward.last)
    return max(map(abs, gaps)) < 1e-5


def _has_room(part: str, ends: Ends) -> bool:
    return ends.last < (0.0 if part in PENALTIES else 1.0) - ROOM


def _measure(versions: Sequence[PolicyVersion], name: str) -> Ends | None:
    """Return the means of a metric over the first and over the last policy versions. Return None if fewer than `LEAST`
    policy versions have the metric.
    """
    values = [version.metrics[name] for version in versions if name in version.metrics]
    if len(values) < LEAST:
        return None
    return Ends(sum(values[:ENDS]) / ENDS, sum(values[-ENDS:]) / ENDS)


@dataclass(frozen=True, slots=True)
class FlipAlarm:
    """An alarm about a scorer whose verdicts flip: they change when a response is judged again. `section` names the
    scorer.
    """

    section: str
    verdicts: int
    flips: int

    @property
    def headline(self) -> str:
        """The alarm as text without numbers. The text stays the same while responses are judged again."""
        return f"verdicts of [{self.section}] flip when responses are judged again"

    @property
    def sentence(self) -> str:
        """The alarm as a sentence."""
        return (
            f"[{self.section}]: {self.flips} of {self.verdicts} verdicts flipped when the response was judged again, "
            "so rewards are partly chance; see which (`rollflow rejudge`), and make the scorer deterministic"
        )


def find_flip_alarms(verdicts: Mapping[str, int], flips: Mapping[str, int]) -> list[FlipAlarm]:
    """Return an alarm for each scorer that changes too many verdicts when responses are judged again. `verdicts` counts
    the second verdicts of each scorer, and `flips` counts the changed ones, by the scorer's config section.
    """
    return [
        FlipAlarm(section, count, flips.get(section, 0))
        for section, count in verdicts.items()
        if count >= LEAST_VERDICTS and compute_lower_bound(flips.get(section, 0), count) > FLIP_LIMIT
    ]


def compute_lower_bound(flips: int, verdicts: int) -> float:
    """Return the lower end of Wilson's interval for the share of flips among second verdicts (Wilson 1927)."""
    share, square = flips / verdicts, Z**2 / verdicts
    spread = Z * math.sqrt(share * (1 - share) / verdicts + square / (4 * verdicts))
    return (share + square / 2 - spread) / (1 + square)
