"""Opens the policy that a command evaluates or plays with: a version of a run, a Hugging Face folder, or the policy of
a recipe. The files of a Hugging Face folder are prepared in a temporary folder as for a new run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollflow.flows.locations import find_published, find_run
from rollflow.flows.policies.earlier_version import find_earlier
from rollflow.flows.preflight import check_policy, read_policy_files
from rollflow.storage.errors import ConfigError, Missing
from rollflow.tasks.policies.folder import find_policy, set_dtype, weight_paths
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.rollout.proxy import WeightsProbe
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.prompt_pins import read_once

NO_PROBE = WeightsProbe((), (), 0.0)


@dataclass(frozen=True, slots=True)
class AskedPolicy:
    """A policy that answers prompts. `folder` contains the policy's config and tokenizer; `weights` returns the folder
    with the policy's weights.

    `probe` contains tokens, and the log-probs that an engine with the policy's weights must compute for the tokens.
    `probe` is empty if the policy is a Hugging Face folder.
    """

    name: str
    folder: Path
    tokenizer: PolicyTokenizer
    weights: Callable[[], Path]
    version: int = 0
    probe: WeightsProbe = NO_PROBE
    context: RunContext | None = None  # the run that the policy belongs to


def open_policy(name: str, version: int | None, store: str | None, config: RunConfig, scratch: Path) -> AskedPolicy:
    """Open the policy that a user names: a Hugging Face folder, or a version of a run.

    The files of a Hugging Face folder, except the weights, are copied to the empty folder `scratch`. If `version` is
    None, the newest version of the run is opened.

    Raises:
        ConfigError: there is no such policy, or the policy cannot be used.
    """
    if not (Path(name).expanduser() / "config.json").exists():
        return open_version(find_run(name, store), version, config)
    if version is not None:
        raise ConfigError(
            f"--version {version}: {name!r} is a folder, which contains only one policy; leave --version out"
        )
    own = config.policy.model_copy(update={"path": name, "from_run": None, "cold_start": None})
    return open_recipe_policy(config.model_copy(update={"policy": own}), scratch)


def open_version(context: RunContext, number: int | None, config: RunConfig | None = None) -> AskedPolicy:
    """Open a version of a run, by default the newest version. `config` (by default, the run's configuration) sets how
    far the log-probs of an engine may differ from the learner's.

    Raises:
        ConfigError: the version is not published, or its weights were deleted.
    """
    published = find_published(context, max(context.policies.newest(), 0) if number is None else number)
    try:
        context.policies.check_kept(published)
    except Missing:
        raise ConfigError(
            f"version = {published.number}: the weights of this version were deleted; choose a version that "
            "store.keep_every or store.keep_last kept"
        ) from None
    tolerance = (config or context.config).probe_tolerance
    return AskedPolicy(
        f"version {published.number} of run {context.run_id}",
        context.policy_folder,
        context.tokenizer,
        lambda: context.weights(published.number),
        published.number,
        WeightsProbe(context.probe_tokens, published.probe, tolerance),
        context,
    )


def open_recipe_policy(config: RunConfig, scratch: Path, read: Reader | None = None) -> AskedPolicy:
    """Open the policy of a recipe, whose files are written to the empty folder `scratch`, unless it is a version of an
    earlier run. The policy of a cold start has a tokenizer, but no weights.

    Raises:
        ConfigError: the policy cannot be used; the message says what the user must change.
    """
    if earlier := find_earlier(config):
        return open_version(earlier.context, earlier.version.number, config)
    files = set_dtype(read_policy_files(config, read or read_once()), config.policy.dtype)
    for name, data in files.items():
        (scratch / name).write_bytes(data)
    tokenizer, path = check_policy(config, scratch, engine=False), config.policy.path
    return AskedPolicy(f"policy {path or config.name}", scratch, tokenizer, lambda: _find_weights(path))


def _find_weights(path: str | None) -> Path:
    if path is None:
        raise ConfigError(
            "policy.cold_start: the policy of this recipe gets its weights only in a run, so it cannot be used "
            "yet; name a run or a folder"
        )
    weight_paths(path)  # raises an error that names missing weight files
    found = find_policy(path)
    assert found is not None, "what is downloaded is there"
    return found
