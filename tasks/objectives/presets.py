"""Presets: named objectives from papers and from other training systems, each defined by its parts.

A part of the objective that a preset does not name has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

UNBOUNDED = 1e9  # upper bound above any ratio, since log-ratios are clipped at 20; finite, since JSON has no infinity

Range = tuple[float, float]
PresetName = Literal[
    "ppo",
    "grpo",
    "dr-grpo",
    "dapo",
    "gspo",
    "decoupled-ppo",
    "tis",
    "mis",
    "geometric-mask",
    "cispo",
    "topr",
    "weighted-topr",
    "reinforce",
    "reinforce++",
    "rloo",
    "kimi",
    "dppo",
    "m2po",
    "roll-current",
    "gigpo",
    "echo",
]


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset: the parts of an objective, and the paper that it comes from."""

    paper: str
    parts: Mapping[str, Any]


def _clip(low: float, high: float) -> dict[str, Any]:
    return {"kind": "clip", "low": low, "high": high}


def _gradient(positive: Range = (1.0, 1.0), negative: Range | None = None) -> dict[str, Any]:
    return {"kind": "policy-gradient", "positive": positive, "negative": negative or positive}


_PROXIMAL = {"ratio": {"to": "proximal"}}

PRESETS: dict[str, Preset] = {
    "ppo": Preset(
        "Schulman et al. 2017, with a critic",
        {"surrogate": _clip(0.2, 0.2), "advantage": {"baseline": "critic", "scale": "whiten"}},
    ),
    "grpo": Preset("Shao et al. 2024; the clip is the higher one of DAPO", {"surrogate": _clip(0.2, 0.28)}),
    "dr-grpo": Preset(
        "Liu et al. 2025, Understanding R1-Zero-like training",
        {"surrogate": _clip(0.2, 0.2), "aggregation": "constant", "advantage": {"scale": "none"}},
    ),
    "dapo": Preset("Yu et al. 2025", {"surrogate": _clip(0.2, 0.28), "advantage": {"overlong": 0.2}}),
    "gspo": Preset(
        "Zheng et al. 2025, Group sequence policy optimization",
        {"ratio": {"level": "geometric"}, "surrogate": _clip(3e-4, 4e-4), "aggregation": "sequence-mean"},
    ),
    "decoupled-ppo": Preset(
        "Hilton et al. 2022, eq. 3; the cap of AReaL (Fu et al. 2025), which drops what is above",
        {**_PROXIMAL, "surrogate": _clip(0.2, 0.28), "correction": {"outside": "clamp", "high": 5.0}},
    ),
    "tis": Preset(
        "Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training",
        {"surrogate": _gradient((0.0, 2.0))},
    ),
    "mis": Preset(
        "Team Ling 2025 (IcePop)",
        {"surrogate": _gradient(), "correction": {"outside": "mask", "low": 0.5, "high": 5.0}},
    ),
    "geometric-mask": Preset(
        "Liu et al. 2025, When speed kills stability (geometric sequence masking)",
        {
            "surrogate": _clip(0.2, 0.28),
            "correction": {"outside": "mask", "level": "geometric", "low": 0.99, "high": 1.01, "weigh": False},
        },
    ),
    "cispo": Preset("MiniMax 2025 (M1), without a lower bound as there", {"surrogate": _gradient((0.0, 1.28))}),
    "topr": Preset(
        "Le Roux et al. 2025",
        {
            "ratio": {"level": "sequence"},
            "surrogate": _gradient((1.0, 1.0), (0.0, 1.0)),
            "aggregation": "sequence-sum",
            "advantage": {"scale": "none"},
        },
    ),
    "weighted-topr": Preset(
        "Le Roux et al. 2025, with weights of the two signs",
        {
            "ratio": {"level": "sequence"},
            "surrogate": _gradient((1.0, 1.0), (0.0, 1.0)),
            "aggregation": "sequence-sum",
            "advantage": {"scale": "none", "negative_weight": 0.5},
        },
    ),
    "reinforce": Preset(
        "Williams 1992",
        {
            "surrogate": _gradient(),
            "aggregation": "sequence-sum",
            "advantage": {"baseline": "none", "scale": "none"},
        },
    ),
    "reinforce++": Preset(
        "Hu et al. 2025",
        {"surrogate": _clip(0.2, 0.2), "advantage": {"baseline": "batch", "scale": "batch"}},
    ),
    "rloo": Preset(
        "Kool et al. 2019; Ahmadian et al. 2024",
        {
            "surrogate": _gradient(),
            "aggregation": "sequence-sum",
            "advantage": {"baseline": "leave-one-out", "scale": "none"},
        },
    ),
    "kimi": Preset(
        "Kimi Team 2025 (k1.5)",
        {
            "ratio": {"level": "sequence"},
            "surrogate": {"kind": "kimi", "tau": 0.1},
            "aggregation": "sequence-sum",
            "advantage": {"scale": "none"},
        },
    ),
    "dppo": Preset(
        "Divergence PPO with a binary total variation, as prime-rl has it",
        {
            "surrogate": {"kind": "binary-tv", "low": 0.2, "high": 0.2},
            "advantage": {"scale": "none"},
            "penalties": {"kl": "k2", "kl_weight": 2e-3},
        },
    ),
    "m2po": Preset(
        "Zheng et al. 2025, Prosperity before collapse; of all tokens, as AReaL has it",
        {"surrogate": _clip(1.0, UNBOUNDED), "correction": {"outside": "second-moment", "second_moment": 0.04}},
    ),
    "roll-current": Preset(
        "ROLL's ratio, to the learner itself: stale samples count as if they were fresh. A baseline",
        {**_PROXIMAL, "surrogate": _clip(0.2, 0.2)},
    ),
    "gigpo": Preset(
        "Feng et al. 2025, Group-in-group policy optimization; the clip and gamma of verl-agent",
        {"surrogate": _clip(0.2, 0.2), "advantage": {"credit": "state", "gamma": 0.95}},
    ),
    "echo": Preset(
        "Shrivastava et al. 2026, Terminal agents learn world models for free; the policy's loss is that of grpo",
        {"surrogate": _clip(0.2, 0.28), "observation_weight": 0.05},
    ),
}

assert PRESETS.keys() == set(get_args(PresetName))
