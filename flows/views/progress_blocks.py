"""Computes the rows of the tables on a run's page in Prefect. Each row of the progress table covers a block of policy
versions. Each row of the other tables covers a kind of sandbox or a kind of environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from rollflow.flows.views.pauses import paused_seconds
from rollflow.flows.views.progress import length_bias
from rollflow.flows.views.reward_alarms import SHOWN_PARTS, list_parts
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.run_records.sandbox_figures import SandboxFigures
from rollflow.tasks.rollout.evaluation import read_evaluations, safe_name
from rollflow.tasks.run.context import RunContext


def block_rows(context: RunContext, blocks: Sequence[tuple[int, int]]) -> Iterator[dict[str, object]]:
    """Yield a row of the progress table for each block (first version, last version) whose policy versions are all
    published.

    The reward and the staleness in a row are means over the policy versions of the row's block. Tokens per second count
    only tokens that were trained on. "Idle" is the share of time that the learner waited for a batch. "Waste" is the
    share of generated tokens that were discarded. The accuracy is the held-out accuracy of the block's newest
    evaluation. If there are several prompt domains, each domain has its accuracy, too. The length bias in a row is
    computed by `length_bias`.
    """
    for first, last in blocks:
        published = list(islice(context.policies.since(first - 1), last - first + 2))
        if len(published) < last - first + 2:
            return
        newest = read_evaluations(context.store, first - 1, last)[-1:]
        yield {
            "versions": f"{first} to {last}" if last > first else str(first),
            **_figures(published, context.config.groups, paused_seconds(context, published[0], published[-1])),
            **_domain_figures(published[1:], list(context.config.shares)),
            "held-out accuracy": "".join(f"{one.accuracy:.3f}" for one in newest),
            **{
                f"held-out accuracy, {domain}": "".join(f"{one.domains[domain].accuracy:.3f}" for one in newest)
                for domain in context.config.shares
                if all(domain in one.domains for one in newest) and len(context.config.shares) > 1
            },
        }


def _domain_figures(versions: Sequence[PolicyVersion], domains: Sequence[str]) -> dict[str, object]:
    """Return the mean reward of each prompt domain, if there are several, and the means of the first `SHOWN_PARTS`
    parts of the reward.
    """
    names = {f"reward, {domain}": f"reward_{safe_name(domain)}" for domain in domains if len(domains) > 1}
    parts = [
        (f"{part}, {domain}" if len(domains) > 1 else part, name)
        for domain in domains
        for part, name in list_parts(versions, domain, domains).items()
    ]
    found = dict[str, object]()
    for shown, name in (*names.items(), *parts[:SHOWN_PARTS]):
        values = [version.metrics[name] for version in versions if name in version.metrics]
        found[shown] = f"{sum(values) / len(values):.3f}" if values else ""
    return found


def _figures(versions: Sequence[PolicyVersion], groups: int, paused: float) -> dict[str, object]:
    before, trained = versions[0], versions[1:]

    def total(name: str) -> float:
        return sum(version.metrics.get(name, 0.0) for version in trained)

    # the seconds are 0 or less if the clock was set back; the row then has no values that need the time
    seconds = trained[-1].at - before.at - paused
    used = total("response_tokens") - total("left_out_tokens")
    lost = total("discarded_tokens") + total("surplus_tokens") + total("left_out_tokens")
    left_out = total("left_out_responses")
    bias = length_bias(
        total("response_tokens"), groups * len(trained), total("discarded_tokens"), total("discarded_groups")
    )
    turns = [version.metrics["turns"] for version in trained if "turns" in version.metrics]
    return {
        **({"turns": f"{sum(turns) / len(turns):.1f}"} if turns else {}),
        "reward": f"{total('reward') / len(trained):.3f}",
        "staleness": f"{total('staleness_mean') / len(trained):.2f}",
        "tokens/s": f"{used / seconds:,.0f}" if seconds > 0 else "",
        "idle": f"{min(1.0, total('wait_seconds') / seconds):.0%}" if seconds > 0 else "",
        "waste": f"{lost / (used + lost):.1%}" if used + lost else "",
        **({"unjudged, left out": f"{left_out:,.0f}"} if left_out else {}),
        "length bias": f"{bias:+.1%}",
    }


def sandbox_rows(kinds: Mapping[str, SandboxFigures]) -> list[dict[str, object]]:
    """Return a row of the table of sandboxes for each kind.

    "Failures" counts programs without a result, because their sandbox failed. "Other limits" counts programs that were
    killed because of their processes, output or files.
    """
    return [
        {
            "kind": kind,
            "started": one.started,
            "renewed": one.renewed,
            "replaced": ", ".join(f"{count} {reason}" for reason, count in one.replaced.items()) or "0",
            "programs": one.programs,
            "failures": one.failures,
            "killed at the deadline": one.ends.get("timeout", 0),
            "killed for memory": one.ends.get("memory", 0),
            "other limits": sum(one.ends.get(end, 0) for end in ("processes", "output", "folder")),
            "median s": _format_seconds(one.find_quantile(0.5)),
            "p99 s": _format_seconds(one.find_quantile(0.99)),
            "in use": one.in_use,
        }
        for kind, one in kinds.items()
    ]


def environment_rows(kinds: Mapping[str, Mapping[str, float]]) -> list[dict[str, object]]:
    """Return the rows of the table of environments, one for each kind. `seconds` is the total time of all calls."""
    return [{"kind": kind, **{name: round(count) for name, count in counts.items()}} for kind, counts in kinds.items()]


def _format_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2g}"
