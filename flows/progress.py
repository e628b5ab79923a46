"""A run's course as its ledger tells it: what the live view, MLflow and the summary are made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollflow.storage.policies import Manifest
from rollflow.tasks.run import RunContext

RECENT = 5  # versions that count as recent


@dataclass
class Progress:
    """Follows the chain of versions; `advance` reads the manifests that are new."""

    context: RunContext
    manifests: list[Manifest] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)  # staleness -> trajectories trained on
    domains: Counter[str] = field(default_factory=Counter)  # domain -> groups trained on

    def advance(self) -> list[Manifest]:
        """The manifests published since the last call."""
        policies = self.context.policies()
        newest = policies.latest(max(self.version, 0))
        new = [policies.manifest(version) for version in range(self.version + 1, newest + 1)]
        sources = self.context.config.prompts
        for manifest in new:
            self.domains.update(sources[key.prompt % len(sources)].domain for key in manifest.consumed)
            for name, count in manifest.metrics.items():
                age = name.removeprefix("staleness_")
                if age != name and age.isdigit():
                    self.staleness[int(age)] += int(count)
        self.manifests += new
        return new

    @property
    def version(self) -> int:
        """The newest version seen; -1 before the first."""
        return len(self.manifests) - 1

    @property
    def rewards(self) -> tuple[float, ...]:
        """Mean training reward of each version's batch."""
        return tuple(m.metrics["reward"] for m in self.manifests[1:])

    @property
    def training_seconds(self) -> float:
        """From version 0 to the newest."""
        return max(0.0, self.manifests[-1].created_at - self.manifests[0].created_at) if self.manifests else 0.0

    @property
    def tokens(self) -> int:
        """Response tokens trained on."""
        return int(sum(m.metrics["response_tokens"] for m in self.manifests[1:]))

    def tokens_per_second(self, recent: int | None = None) -> float:
        """Trained response tokens over the time it took, for all versions or the newest `recent`."""
        last = self.manifests[-(recent or len(self.manifests)) - 1 :] if recent else self.manifests
        if len(last) < 2:
            return 0.0
        seconds = last[-1].created_at - last[0].created_at
        # The clocks of two learners, or one that stepped back: better no figure than a wrong one.
        return sum(m.metrics["response_tokens"] for m in last[1:]) / seconds if seconds > 0 else 0.0
