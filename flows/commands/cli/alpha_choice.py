"""Says which alpha (`async_ratio`, the largest staleness of a trained sample) is best for a recipe on this machine. The
alphas are simulated with the times of a recorded run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollflow.flows.keepalive.overlap import Overlap, keys_in_turns
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.alphas import AlphaOutcome, choose_alpha
from rollflow.tasks.simulation.planner import TOLERANCE


def describe_alphas(config: RunConfig, overlap: Overlap, outcomes: Sequence[AlphaOutcome]) -> Iterator[str]:
    """Yield sentences: which hardware engines and learner share, the simulated step time at each alpha, and which
    config key to set.
    """
    chosen = choose_alpha(outcomes)
    yield _describe_sharing(overlap)
    yield "simulated step: " + ", ".join(map(_describe_outcome, outcomes))
    yield f"set {_name_keys(config, overlap, chosen)}: {_give_reason(outcomes, chosen)}"


def _describe_sharing(overlap: Overlap) -> str:
    have = f"{overlap.have:.3g} {overlap.of}s"
    if overlap.own:
        return f"on this machine ({have}) engines and learner have {overlap.of}s of their own"
    return (
        f"on this machine engines and learner share {have}; while both work, each is assumed to run at "
        f"{overlap.shared_speed:.0%} of its speed"
    )


def _describe_outcome(one: AlphaOutcome) -> str:
    stale = f" (mean staleness {one.figures.staleness_mean:.2f})" if one.async_ratio else ""
    return f"alpha {one.async_ratio:g} {one.step_seconds:,.4g} s{stale}"


def _name_keys(config: RunConfig, overlap: Overlap, chosen: AlphaOutcome) -> str:
    shared = chosen.async_ratio == 0 and not overlap.own
    return keys_in_turns(config, overlap) if shared else f"async_ratio = {chosen.async_ratio:g}"


def _give_reason(outcomes: Sequence[AlphaOutcome], chosen: AlphaOutcome) -> str:
    fastest = min(outcomes, key=lambda one: one.step_seconds)
    if fastest is chosen and chosen.async_ratio:
        fresh = outcomes[0]
        gain = fresh.step_seconds / chosen.step_seconds
        return (
            f"it is {gain:.2f} times as fast as alpha {fresh.async_ratio:g}, and its samples are "
            f"{chosen.figures.staleness_mean:.2f} versions old on average"
        )
    if fastest is chosen:
        return "no larger alpha is faster, and its samples are never stale"
    return (
        f"the smallest alpha within {TOLERANCE:.0%} of the fastest one (alpha {fastest.async_ratio:g}), with fresher "
        "samples"
    )
