"""Adapts an environment with the methods of a gymnasium environment: `reset(seed=...)`, `step(action)` and `close()`.

The policy reads an observation as text, and answers with a text that names an action.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollflow.tasks.environments.guest.durable import DurableParts
from rollflow.tasks.environments.guest.frames import mark_colours, render_frame
from rollflow.tasks.environments.guest.wire import LONGEST_TEXT, EnvironmentFault, Fields

STEPS = "_elapsed_steps"  # attribute in which gymnasium's wrapper TimeLimit counts steps
WORD = re.compile(r"[^\W_]+(?:[-_'][^\W_]+)*|[^\w\s]")


class GymnasiumGuest:
    """Serves an episode with an environment that has the methods of a gymnasium environment."""

    def __init__(self, spec: Fields, parts: dict[str, Any]) -> None:
        self._observe, self._act = parts.get("observe"), parts.get("act")
        self._own = create_environment(spec, parts)
        self._durable = DurableParts(getattr(self._own, "unwrapped", self._own))
        if not self._act:
            self._actions = build_actions(spec["actions"], getattr(self._own, "action_space", None))

    def describe(self) -> Fields:
        """Return the description of an environment without tools that computes its own rewards."""
        return {"tools": [], "has_reward": True, **self._durable.describe()}

    def do_reset(self, row: Mapping[str, Any], seed: int) -> Fields:
        """Begin the episode. A column `seed` of the prompt's row replaces the seed of the run."""
        found, info = self._own.reset(seed=int(row.get("seed", seed)))
        return {"text": self._describe_state(found, info)}

    def do_step(self, text: str, key: str = "") -> Fields:
        """Perform the action that the policy's text names. `key` identifies the action in its run."""
        try:
            action = self._act(text) if self._act else find_action(text, self._actions)
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            return {"invalid": str(error) or type(error).__name__}
        done = self._durable.begin_action(key)
        found, reward, terminated, truncated, info = self._own.step(action) if done is None else done
        ended = bool(terminated) or bool(truncated)
        return {"text": self._describe_state(found, info), "reward": float(reward), "ended": ended}

    def do_snapshot(self) -> Fields:
        """Return the state of the episode, and the number of steps that each gymnasium wrapper has counted."""
        counted = [getattr(one, STEPS) for one in list_counters(self._own)]
        return {**self._durable.take_snapshot(), "counted": counted}

    def do_restore(self, data: str, counted: list[Any]) -> Fields:
        """Restore the state that the episode had when a snapshot was taken."""
        for number, one in enumerate(list_counters(self._own)):
            setattr(one, STEPS, counted[number])
        return self._durable.restore(data)

    def do_render(self) -> Fields:
        """Return what the environment renders, for people."""
        return render_frame(self._own)

    def do_close(self) -> Fields:
        """Close the environment."""
        self._own.close()
        return {}

    def _describe_state(self, found: Any, info: Mapping[str, Any]) -> str:
        """Return the text of a state: the result of the user's function `observe`, the rendered text, or the
        observation as text."""
        if self._observe:
            return str(self._observe(found, info))[:LONGEST_TEXT]
        if getattr(self._own, "render_mode", None) == "ansi":
            found = self._own.render()
            found = "".join(map(str, found)) if isinstance(found, list) else found
        return mark_colours(str(found))[:LONGEST_TEXT]


def list_counters(environment: Any) -> Iterator[Any]:
    """Yield the wrappers of an environment that count steps, beginning with the outermost wrapper."""
    while hasattr(environment, "env"):
        if STEPS in vars(environment):
            yield environment
        environment = environment.env


def create_environment(spec: Fields, parts: dict[str, Any]) -> Any:
    """Create the environment. If the config names no render mode and the environment can render text (mode "ansi"),
    this mode is used. If frames are wanted and the environment renders no text, the mode is "rgb_array".
    """
    options, wanted = dict(spec["options"]), ("ansi", "rgb_array") if spec.get("frames") else ("ansi",)
    if parts.get("path"):
        factory = parts["path"]
        modes = (getattr(factory, "metadata", None) or {}).get("render_modes", ())
        if "render_mode" in inspect.signature(factory).parameters:
            options = {**choose_mode(modes, wanted), **options}
        return factory(**options)
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    try:
        entry = gymnasium.spec(spec["id"]).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        modes = (getattr(creator, "metadata", None) or {}).get("render_modes", ())
        return gymnasium.make(spec["id"], **{**choose_mode(modes, wanted), **options})
    except gymnasium.error.Error as error:
        raise EnvironmentFault(f"gymnasium cannot create the environment ({error})") from error


def choose_mode(modes: Sequence[str], wanted: Sequence[str]) -> Fields:
    """Return the first wanted render mode that an environment has, as an option; {} if it has none."""
    return next(({"render_mode": mode} for mode in wanted if mode in modes), {})


def build_actions(given: Mapping[str, Any], space: Any) -> dict[str, Any]:
    """Return a mapping of words in lower case to actions, by default the numbers of a discrete action space.

    Raises:
        EnvironmentFault: the action space is not discrete, and the config names no actions.
    """
    if given:
        return {word.lower(): action for word, action in given.items()}
    count: Any | None = getattr(space, "n", None)
    if type(space).__name__ != "Discrete" or count is None:
        what = f"actions = {{}}: the actions of the space {space} have no numbers"
        raise EnvironmentFault(what + "; set environment.actions or environment.act")
    start = int(getattr(space, "start", 0))
    return {str(number): number for number in range(start, start + int(count))}


def find_action(text: str, actions: Mapping[str, Any]) -> Any:
    """Return the action that the text names last. If several names end at the same position, the longest name is
    chosen.

    Raises:
        ValueError: the text names no action.
    """
    said = text.lower()
    found = [(one.end(), len(one.group()), one.group()) for one in WORD.finditer(said) if one.group() in actions]
    for name in actions:
        if name and name in said and not WORD.fullmatch(name):  # a name like "go on", "->" or "-1"
            found.append((said.rfind(name) + len(name), len(name), name))
    if not found:
        raise ValueError("no action; the actions are " + ", ".join(actions))
    return actions[max(found)[2]]
