"""Finds the errors that would make a run fail, before any process is started. `rollflow check`, `run`, `sweep` and the
Prefect deployments call `preflight`, so that all of them reject the same recipes with the same message. Only the
libraries that the recipe needs are imported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rollflow.flows.config import check_new_run
from rollflow.flows.keepalive.gpus import divide_gpus, spans_gpus
from rollflow.flows.keepalive.placement import check_private_placement, note_placement
from rollflow.flows.locations import read_policy_folder, store_uri
from rollflow.flows.policies.earlier_version import EarlierVersion, find_earlier, name_policy, open_weights
from rollflow.flows.policies.engine_checks import check_engine, check_kv_cache, check_room
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.ray_cluster.ray_access import check_membership
from rollflow.flows.services.profile import prefect_url
from rollflow.flows.services.reachability import check_folder, check_mlflow, check_prefect, check_ray, check_store_reach
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.storage.log.entries import SourceVersion
from rollflow.storage.objects import Data, open_store
from rollflow.storage.objects.disk import map_file
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.vllm.passed_arguments import check_names, read_names
from rollflow.tasks.environments.config import ToolsEnvironment, split_environments
from rollflow.tasks.learners.config import DeepSpeedTrain
from rollflow.tasks.policies.folder import (
    build_cold_folder,
    copy_folder,
    find_policy,
    set_dtype,
)
from rollflow.tasks.policies.stop import GENERATION
from rollflow.tasks.policies.tokenizer import PolicyTokenizer, find_other_reading
from rollflow.tasks.policies.validation import (
    check_config,
    check_files,
    check_rows,
    check_templates,
    describe_ends,
    name_end_tokens,
)
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.prompts.config import FileBase
from rollflow.tasks.prompts.near_duplicates import near_duplicates
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.run.cold_start.demonstration_check import compare_demonstrations
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext, open_prompts, probe_tokens
from rollflow.tasks.run.prompt_check import (
    Tell,
    describe_files,
    fit_files,
    list_asked,
    probe_sources,
    read_files,
    try_pytest_cases,
)
from rollflow.tasks.run.prompt_pins import Pin, pin_prompts, read_once
from rollflow.tasks.run.reward_models import check_models, check_pinned
from rollflow.tasks.run.scorer_trial import try_own_scorers
from rollflow.tasks.run.user_code import check_own_parts
from rollflow.tasks.sandboxes.config import SandboxConfig, ServerSandbox
from rollflow.tasks.sandboxes.trial import try_sandboxes
from rollflow.tasks.scorers.config import CodeReward, split_scorers

VOCABULARY_TEXTS = 2000


@dataclass(frozen=True, slots=True)
class Preflight:
    """The results of the checks of a new run: the policy's files, the prompts, and notes for the user.

    `files` and `weights` map names to the files of the policy. `probe` has tokens on which an inference engine and the
    learner are compared after a weight update. `read` is a function that returns the content of a prompt file, and
    `pins` has the hashes of the prompt files. `notes` are sentences for the user, for example about checks that were
    skipped. If the policy was not read, `files`, `weights`, `probe` and `pins` are empty. `source_version` names the
    version of an earlier run from which the policy was copied, if any.
    """

    files: Mapping[str, bytes]
    weights: Mapping[str, Data]
    probe: tuple[int, ...]
    pins: tuple[Pin, ...]
    read: Reader
    notes: tuple[str, ...] = ()
    source_version: SourceVersion | None = None


def preflight(config: RunConfig, *, download: bool = True, ask: bool = True, tell: Tell = lambda _: None) -> Preflight:
    """Check everything about a new run that can be checked before it starts.

    If `download` is false, no policy is downloaded or copied. If `ask` is false, no service is contacted. `tell` is
    called with messages about the progress of the checks.

    Raises:
        ConfigError: the run would fail; the message says what the user must change in the recipe.
    """
    check_new_run(config)
    check_own_parts(config)
    cluster.check_actor_options(config.cluster)
    notes = check_places(config, ask)
    _check_installed(config)
    notes += [*_check_sandbox(config, ask), *check_models(config, download)]
    read = read_once()
    rows = read_files(config, read)
    try_pytest_cases(config, list_asked(rows))
    if unread := _note_unread_policy(config, download, ask):
        notes += [*_note_few_held_out(config, open_prompts(config, None, read).count_held_out()), unread]
        return Preflight({}, {}, (), (), read, tuple(notes))
    earlier = find_earlier(config)
    files = set_dtype(read_policy_files(config, read, earlier), config.policy.dtype)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        tokenizer = check_policy(config, folder)
        files |= {GENERATION: (folder / GENERATION).read_bytes()}
        read, found = fit_files(config, rows, tokenizer, read, tell)
        prompts = open_prompts(config, tokenizer, read)
        notes += [describe_ends(tokenizer), *found, *probe_sources(config, prompts, tokenizer)]
        notes += compare_demonstrations(config, prompts, tokenizer)
        if ask and config.cluster.address == "auto":
            notes += try_own_scorers(config, prompts, tokenizer)
        notes += _note_few_held_out(config, len(prompts.held_out()))
        notes += [*describe_files(prompts), _note_near_duplicates(config, prompts)]
        first = [prompts.prompt(index) for index in range(max(min(config.groups, 64), len(config.prompts)))]
        _check_tokenizer_agrees(config, folder, [prompt.text for prompt in first])
        with open_weights(config, earlier, copy=download) as paths:
            if paths:  # The policy of a cold start has no weights yet; the learner initializes them.
                _check_weights(config, folder, tokenizer, paths)
            weights = {file.name: map_file(file) for file in paths}
        # vLLM samples a token after the probe, so the probe must be shorter than the context.
        length = min(tokenizer.probe_length, max(2, config.engine.limit_context(tokenizer.context) - 1))
        probe, pins = probe_tokens(prompts, length), pin_prompts(config, prompts, read)
    notes += [earlier.describe(copied=download)] if earlier else []
    return Preflight(
        files, weights, tuple(probe), pins, read, tuple(notes), earlier.source_version if earlier else None
    )


def _note_unread_policy(config: RunConfig, download: bool, ask: bool) -> str:
    """Return a note if the policy is not checked, because it must not be downloaded or its store must not be contacted.
    Otherwise return "".
    """
    path, earlier = config.policy.path, config.policy.from_run
    if path is not None and find_policy(path, download) is None:
        return (
            f"policy.path = {path!r} is not in this machine's cache of the Hugging Face hub, so its tokenizer, "
            "template, context and weights were not checked; `rollflow run` downloads and checks them first"
        )
    if earlier is not None and not ask and "://" in (earlier.run if "/" in earlier.run else store_uri(config)):
        return f"not asked: policy.from_run.run = {earlier.run!r}; `rollflow run` checks the policy of this run first"
    return ""


def recheck(config: RunConfig, context: RunContext) -> None:
    """Check the changed configuration of a recorded run, and the run's stored policy, before the run continues.

    Raises:
        ConfigError: the run would fail; the message says what the user must change in the recipe.
    """
    check_new_run(config, context.config)
    check_own_parts(config)
    check_pinned(config, context)
    cluster.check_actor_options(config.cluster)
    check_addresses(config, context.uri)
    _check_installed(config)
    _check_sandbox(config, ask=True)
    folder, tokenizer = context.policy_folder, context.tokenizer
    check_engine(config, folder)
    check_room(config, tokenizer)
    check_kv_cache(config, folder, tokenizer)


def check_places(config: RunConfig, ask: bool = True) -> list[str]:
    """Check that the run's storage can be written and that every service answers. Return notes on checks that were
    skipped.

    Raises:
        ConfigError: the storage or a service cannot be used.
    """
    uri, tracking = store_uri(config), config.tracking.uri
    if ask:
        notes = check_addresses(config, uri)
        open_store(uri).check()
        return notes
    check_store_reach(uri, config.cluster.address)
    if "://" not in uri:
        check_folder("store.uri", uri, Path(uri).expanduser().absolute())
    if tracking and tracking.startswith(("sqlite:", "file:", "/", ".")):
        check_mlflow(tracking)
    named = {
        "PREFECT_API_URL": prefect_url(),
        "cluster.address": config.cluster.address if config.cluster.address != "auto" else "",
        "store.uri": uri if "://" in uri else "",
        "tracking.uri": tracking if tracking and tracking.startswith(("http:", "https:")) else "",
    }
    asked = [key for key, address in named.items() if address]
    return [f"not asked: {', '.join(asked)}"] if asked else []


def check_addresses(config: RunConfig, store: str) -> list[str]:
    """Check that every service that the configuration names answers. Return notes on the resources of the Ray cluster.

    Every node of the Ray cluster must be able to read the run's `store`, and the cluster must have the GPUs that the
    configuration needs.

    Raises:
        ConfigError: a service does not answer; the message names the service.
    """
    address, notes = config.cluster.address, list[str]()
    check_store_reach(store, address)
    if url := prefect_url():
        check_prefect(url)
    check_ray(address)
    check_private_placement(config)
    if address != "auto":
        _check_membership(address)
    if address == "auto" and spans_gpus(config):
        divide_gpus(config, [cluster.count_machine_gpus()])
    if address != "auto":
        with cluster.attached_cluster(address, "check"):
            check_store_reach(store, address, cluster.list_nodes())
            divide_gpus(config, cluster.node_gpus())
            notes += note_placement(config, cluster.living_nodes())
    if config.tracking.uri:
        check_mlflow(config.tracking.uri)
    return notes


def _check_membership(address: str) -> None:
    try:
        check_membership(address)
    except Unreachable as error:
        raise ConfigError(f"cluster.address = {address!r}: {error}; try again, or correct the address") from None


def _check_installed(config: RunConfig) -> None:
    """Reject a configuration that needs a library that is not installed, or an argument that the installed vLLM does
    not have. If the run uses another Ray cluster, nothing is checked.
    """
    if config.cluster.address != "auto":
        return
    if isinstance(config.engine, VllmEngineConfig) and find_spec("vllm") is None:
        cure = 'install it with `pip install "rollflow[cpu]"` (or "rollflow[gpu]"), or set engine.kind = "transformers"'
        raise ConfigError(f"engine.kind = 'vllm': vLLM is not installed on this machine; {cure}")
    if isinstance(config.engine, VllmEngineConfig) and config.engine.vllm:
        check_names(config.engine.vllm, read_names())
    if isinstance(config.train, DeepSpeedTrain) and find_spec("deepspeed") is None:
        cure = 'install it with `pip install "rollflow[deepspeed]"`, or set train.kind = "torch"'
        raise ConfigError(f"train.kind = 'deepspeed': DeepSpeed is not installed on this machine; {cure}")


def _check_sandbox(config: RunConfig, ask: bool) -> list[str]:
    """Reject a configuration whose sandboxes cannot run programs on this machine. Return notes on sandboxes that were
    not tried.

    If the run uses another Ray cluster, no sandbox is tried, because sandboxes run on the cluster's nodes.
    """
    if config.cluster.address != "auto":
        return []
    notes = list[str]()
    for section, sandbox in _list_sandboxes(config).items():
        if isinstance(sandbox, ServerSandbox) and not ask:
            notes.append(f"not asked: {section}.sandbox.url = {sandbox.url!r}")
            continue
        try:
            try_sandboxes(sandbox)
        except ConfigError as error:
            raise ConfigError(f"{section}.{error}") from None
    return notes


def _list_sandboxes(config: RunConfig) -> dict[str, SandboxConfig]:
    """Return the sandboxes of the run's tool python and of its scorers, by the configuration section that contains the
    sandbox. Equal sandboxes are returned once.
    """
    found = dict[str, SandboxConfig]()
    for key, environment in split_environments(config.environment).items():
        if isinstance(environment, ToolsEnvironment) and environment.python is not None:
            found[f"{key}.python"] = environment.python.sandbox
    for section, reward in split_scorers(config.scorers).items():
        if isinstance(reward, CodeReward) and reward.sandbox not in found.values():
            found[section] = reward.sandbox
    return found


def _note_near_duplicates(config: RunConfig, prompts: RunPrompts) -> str:
    """Return a note that says how many held-out prompts nearly equal a training prompt."""
    return near_duplicates(prompts, config.versions * config.groups).sentence()


def _note_few_held_out(config: RunConfig, found: int) -> list[str]:
    """Return a note if fewer prompts are held out for evaluation than the configuration asks for."""
    if found >= config.evaluation.prompts:
        return []
    own = any(isinstance(source, FileBase) and source.held_out_file for source in config.prompts)
    cure = "lower it, or hold out more rows" if own else "raise prompts.held_out, or give more lines"
    few = f"only {found} {'prompt is' if found == 1 else 'prompts are'} held out for evaluation; {cure}"
    return [f"evaluation.prompts = {config.evaluation.prompts}: {few}"]


def read_policy_files(config: RunConfig, read: Reader, earlier: EarlierVersion | None = None) -> dict[str, bytes]:
    """Return the files of the policy folder without the weights. If `earlier` is given, the folder is that of the
    earlier run. Otherwise it is the folder at `policy.path`, or the folder of a new small policy for a cold start.
    """
    if earlier is not None:
        return read_policy_folder(earlier.context)
    if config.policy.cold_start is None:
        assert config.policy.path is not None
        return copy_folder(config.policy.path)
    return build_cold_folder(config.policy.cold_start, open_prompts(config, None, read).texts(VOCABULARY_TEXTS))


def check_policy(config: RunConfig, folder: Path, *, engine: bool = True) -> PolicyTokenizer:
    """Check the policy's files, inference engine, end tokens, context length and chat templates. Write all end tokens
    of the policy into the files in `folder`, and return the policy's tokenizer. If `engine` is false, the inference
    engine is not checked.

    Raises:
        ConfigError: the policy cannot answer the recipe's prompts.
    """
    check_files(folder)
    if config.policy.cold_start is None:
        check_config(folder)
    if engine:
        check_engine(config, folder)
    name_end_tokens(folder)
    tokenizer = PolicyTokenizer(folder)
    check_room(config, tokenizer)
    check_templates(config.prompts, tokenizer)
    if engine:
        check_kv_cache(config, folder, tokenizer)
    return tokenizer


def _check_weights(config: RunConfig, folder: Path, tokenizer: PolicyTokenizer, paths: Sequence[Path]) -> None:
    """Reject weights that do not fit the policy's configuration, and a vocabulary that is larger than the embedding."""
    from rollflow.tasks.policies.tensors import check_tensors  # imports torch

    for file in paths:
        (folder / file.name).symlink_to(file.resolve())
    check_rows(tokenizer, check_tensors(folder, config.policy.dtype))


def _check_tokenizer_agrees(config: RunConfig, folder: Path, texts: list[str]) -> None:
    """Reject a policy whose tokenizer other tools would load differently, because these tools could not use the trained
    policy.
    """
    if config.policy.cold_start is None and (what := find_other_reading(folder, texts)) is not None:
        raise ConfigError(
            f"{name_policy(config.policy)}: {what}; save the tokenizer that is right: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes AutoTokenizer and "
            "tokenizer.json agree"
        )
