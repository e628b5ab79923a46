"""Tests with random `[cluster]` sections and settings files: each is accepted, or rejected with the key, the value and
a fix.

An accepted section is stored as JSON without a password, and Ray accepts its options for actors. A settings file has
the same effect on a run as a recipe with the same keys. No error shows a secret.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import ray
import tomlkit
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollflow.flows.commands.cli.settings import SECRETS, VARIABLES, load_settings
from rollflow.flows.config import check_new_run, override_config, parse_config
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.placement import Role, actor_options
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import tree_of
from rollflow.tasks.runtime.sections import LONGEST_SECONDS
from tests.support.counts import examples

PLANTED = "planted-4711"
WITH_PASSWORD = f"http://me:{PLANTED}@proxy:3128"
ACTOR: Any = ray.remote(type("Actor", (), {}))

text = st.text(max_size=8) | st.sampled_from(
    ["a", "a/b", "ray.io/market-type", "a b", "-", "\0", "\x7f", "x" * 64, '"']
)
nonsense = st.none() | st.booleans() | st.integers() | st.floats() | text | st.lists(text, max_size=2)
names = st.sampled_from(["NCCL_DEBUG", "HTTPS_PROXY", "HF_TOKEN", "my key", "", "1A", "É", "a=b"]) | text
values = text | st.sampled_from(["1", WITH_PASSWORD, "no\0thing"])
resources = text | st.sampled_from(["rollout", "CPU", "GPU", "TPU", "neuron_cores", "memory", "object_store_memory"])
labels = st.dictionaries(text, text, max_size=2)
role = st.fixed_dictionaries({}, optional={"labels": labels, "resource": resources})
placement = st.fixed_dictionaries(
    {},
    optional={
        "strategy": st.sampled_from(["spread", "pack"]),
        "reserve_cpus": st.booleans(),
        **dict.fromkeys(get_args(Role), role),
    },
)
seconds = st.floats() | st.integers(-1, 2**70) | st.sampled_from([0, 1e-300, 1e9, 600])
packages = st.lists(text, max_size=2) | st.sampled_from([["einops"], ["-i", f"{WITH_PASSWORD}/simple"]])
tree = st.recursive(nonsense, lambda below: st.dictionaries(text, below, max_size=2), max_leaves=3)
runtime_env = st.dictionaries(
    st.sampled_from(["pip", "uv", "conda", "working_dir", "py_modules", "config", "env_vars", "image_uri", "excludes"]),
    packages | tree,
    max_size=3,
)

count = st.integers(-1, 5) | st.just(2**70)
reward_actors = st.fixed_dictionaries(
    {}, optional={"min": count, "max": count, "grow_seconds": seconds, "idle_seconds": seconds}
)


def or_nonsense(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw a value of a config key: a valid value with probability 4/5, and otherwise any value."""
    return st.integers(0, 4).flatmap(lambda drawn: strategy if drawn else tree)


section = st.fixed_dictionaries(
    {},
    optional={
        "lease_seconds": or_nonsense(seconds),
        "placement": or_nonsense(placement),
        "env": or_nonsense(st.dictionaries(names, values, max_size=2)),
        "runtime_env": or_nonsense(runtime_env),
        "reward_actors": or_nonsense(reward_actors),
        "environment_actors": or_nonsense(reward_actors),
    },
)


def read(given: Mapping[str, Any]) -> RunConfig:
    """Read a recipe with this section `[cluster]`, and check it as a new run does before any service is contacted."""
    config = parse_config({"cluster": given})
    check_new_run(config)
    cluster.check_actor_options(config.cluster)
    return config


def check_refusal(said: str) -> None:
    """Check that each sentence of an error names a key and a value, is one line, and shows no secret."""
    assert PLANTED not in said
    lines = said.split("\n  ")
    for line in lines if len(lines) == 1 else lines[1:]:
        key, separator, rest = line.partition(" = ")
        assert key.partition(".")[0] in ("cluster", "store", "tracking"), line
        assert separator, line
        assert len(rest.splitlines()) == 1, line


@pytest.mark.many
@settings(max_examples=examples(3000), deadline=None)
@given(section)
@example({"env": {"HTTPS_PROXY": WITH_PASSWORD}})
@example({"env": {"A": "no\0thing"}})
@example({"env": {"my secret key": PLANTED}})
@example({"placement": {"engine": {"resource": "GPU"}}})
@example({"placement": {"engine": {"labels": {"a b": "c"}}}})
def test_random_cluster_section_is_accepted_or_refused(given: Mapping[str, Any]) -> None:
    try:
        config = read(given)
    except ConfigError as error:
        check_refusal(str(error))
        return
    assert parse_config(json.loads(json.dumps(tree_of(config)))) == config
    assert PLANTED not in json.dumps(tree_of(config))
    for name in get_args(Role):
        ACTOR.options(**actor_options(config, name, 1.0))
    assert 0 <= config.cluster.lease_seconds <= LONGEST_SECONDS
    assert all("\0" not in f"{name}{value}" for name, value in config.cluster.env.items())


addresses = text | st.sampled_from(["s3://b/p", "http://h:5000", "sqlite:///t.db", WITH_PASSWORD, "10.0.0.1:6379"])
variables = st.dictionaries(
    st.sampled_from([*VARIABLES, *SECRETS, "HF_TOKEN", "RAY_AUTH_TOKEN", "RAY_ADDRESS"]) | text,
    or_nonsense(addresses),
    max_size=2,
)
counts = st.integers(-1, 9)
sections = {
    "store": st.fixed_dictionaries({}, optional={"uri": or_nonsense(addresses), "keep_last": or_nonsense(counts)}),
    "cluster": st.builds(dict, section, address=or_nonsense(addresses)) | section,
    "tracking": st.dictionaries(st.sampled_from(["uri", "experiment", "experimint"]), or_nonsense(addresses)),
    "train": st.fixed_dictionaries({"learning_rate": st.just(1.0)}),
}
files = st.fixed_dictionaries(
    {}, optional={"variables": or_nonsense(variables), **{key: or_nonsense(one) for key, one in sections.items()}}
)


def in_toml(tree: Any) -> Any:
    """Return a copy of a config tree without None, which TOML cannot express."""
    if isinstance(tree, Mapping):
        return {key: in_toml(value) for key, value in tree.items() if value is not None}
    return [in_toml(value) for value in tree if value is not None] if isinstance(tree, list) else tree


@pytest.mark.many
@settings(max_examples=examples(3000), deadline=None)
@given(files)
@example({"tracking": {"experiment": "a\x7fb"}})
@example({"cluster": {"env": {"HTTPS_PROXY": WITH_PASSWORD}}})
@example({"variables": {"HF_TOKEN": PLANTED}})
def test_random_settings_file_is_accepted_or_refused(tree: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.toml")
        file.write_text(tomlkit.dumps(in_toml(tree)), encoding="utf-8")
        prefix = f"settings file {str(file)!r}"
        try:
            read = load_settings(file)
        except ConfigError as error:
            said = str(error)
            assert said.startswith(prefix), said
            assert "TOML" not in said, said
            assert PLANTED not in said
            if not any(
                word in said for word in ("variables", "write [", "not a section of a settings file", "has a password")
            ):
                check_refusal(said.removeprefix(f"{prefix}: "))
            return
        assert PLANTED not in f"{read}"
        assert {**read.variables}.keys() <= {*VARIABLES}
        assert override_config(tree_of(parse_config({})), read.overrides) == read.config
