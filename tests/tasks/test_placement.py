"""Actors run on the nodes that the recipe names, and reserve what they use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows import preflight
from rollflow.flows.config import load_recipe, parse_config
from rollflow.flows.keepalive.placement import check_private_placement, needed_cpus, note_placement
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.ray_cluster.ray_head import RayHead, RayNode
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.early_imports import KIND
from rollflow.tasks.actors.placement import LEAST, actor_options, engine_cpus, learner_cpus
from rollflow.tasks.actors.spread.member import NodeChoice
from rollflow.tasks.run.cluster_config import ClusterConfig, RewardActorsConfig
from rollflow.tasks.run.config import RunConfig
from tests.support.waiting import RUN_SECONDS

ELSEWHERE = "10.0.0.1:6379"
FAST = {"ray.io/accelerator-type": "H100"}


def config(**keys: Any) -> RunConfig:
    """Return the config of a run on a shared cluster, with these keys of `[cluster]`."""
    return parse_config({"cluster": {"address": ELSEWHERE, **keys}})


def test_default_placement_reserves_only_gpus() -> None:
    assert actor_options(config(), "learner", 4.0, gpus=2.0, imports="learner") == {"num_cpus": LEAST, "num_gpus": 2.0}
    spread = {"num_cpus": LEAST, "num_gpus": 0.0, "scheduling_strategy": "SPREAD"}
    assert actor_options(config(), "engine", 4.0) == spread


def test_key_reserve_cpus_reserves_a_cpu_for_each_thread() -> None:
    options = actor_options(config(placement={"reserve_cpus": True}), "learner", 4.0)
    assert options["num_cpus"] == 4.0


def test_placement_labels_apply_only_to_their_role() -> None:
    placed = config(placement={"strategy": "pack", "engine": {"labels": FAST}, "learner": {"resource": "train"}})
    assert actor_options(placed, "engine", 1.0) == {"num_cpus": LEAST, "num_gpus": 0.0, "label_selector": FAST}
    assert actor_options(placed, "learner", 1.0) == {"num_cpus": LEAST, "num_gpus": 0.0, "resources": {"train": LEAST}}
    assert actor_options(placed, "reward", 1.0) == {"num_cpus": LEAST, "num_gpus": 0.0}


def test_actor_reserves_a_cpu_for_each_of_its_threads() -> None:
    tree = parse_config(
        {"engine": {"kind": "transformers", "threads": 3}, "train": {"threads": 2, "ranks": 2}, "groups": 32}
    )
    assert engine_cpus(tree.engine) == 3.0
    assert learner_cpus(tree) == 4.0
    assert needed_cpus(tree) == 3 + 3 + 4 + 1 + 1  # an engine, one that evaluates, two ranks, scheduler, a verifier
    helped = tree.model_copy(update={"cluster": ClusterConfig(reward_actors=RewardActorsConfig(min=3))})
    assert needed_cpus(helped) == 3 + 3 + 4 + 1 + 3


def test_helper_starts_on_the_fitting_node_with_fewest_actors() -> None:
    node = {"Alive": True, "Labels": FAST, "Resources": {"CPU": 2.0}}
    nodes = [
        {**node, "NodeID": "a"},
        {**node, "NodeID": "b"},
        {**node, "NodeID": "dead", "Alive": False},
        {**node, "NodeID": "without CPUs", "Resources": {}},
        {**node, "NodeID": "other", "Labels": {}},
    ]

    def choose(tree: RunConfig, used: Mapping[str, float], among: Sequence[Mapping[str, Any]] = nodes) -> str | None:
        return NodeChoice(tree, "reward", 1.0, used).choose(among)

    placed = config(placement={"reward": {"labels": FAST}})
    assert choose(placed, {"a": 1}) == "b"
    assert choose(placed, {"a": 1, "b": 2}) == "a"
    assert choose(config(), {"a": 1, "b": 1}) == "other"
    assert choose(placed, {}, nodes[2:]) is None
    assert choose(config(placement={"strategy": "pack"}), {}) is None
    large = config(placement={"reserve_cpus": True})
    assert choose(large, {"b": 3}, [{**nodes[0], "Resources": {"CPU": 0.5}}, nodes[1]]) == "b"


def test_every_actor_gets_the_environment_variables() -> None:
    tree = config(env={"NCCL_DEBUG": "WARN"}, runtime_env={"pip": ["einops"]})
    expected = {"pip": ["einops"], "env_vars": {"NCCL_DEBUG": "WARN"}}
    assert actor_options(tree, "engine", 1.0)["runtime_env"] == expected
    assert actor_options(tree, "reward", 1.0, imports="reward")["runtime_env"] == expected


def test_actors_import_early_only_on_a_private_ray_cluster() -> None:
    own = parse_config({})
    assert actor_options(own, "learner", 1.0, imports="learner")["runtime_env"] == {"env_vars": {KIND: "learner"}}
    assert "runtime_env" not in actor_options(own, "learner", 1.0, gpus=0.5, imports="learner")
    assert "runtime_env" not in actor_options(config(), "learner", 1.0, imports="learner")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"env": {"HF_TOKEN": "hf_x"}},
            r"cluster.env.HF_TOKEN = '...': a run stores its config, so this secret would be stored",
        ),
        ({"env": {"AWS_SECRET_ACCESS_KEY": "x"}}, "cluster.env.AWS_SECRET_ACCESS_KEY = '...': a run stores its config"),
        ({"env": {"a b": "1"}}, "cluster.env.a b = '...': this is not a valid name of an environment variable"),
        (
            {"runtime_env": {"env_vars": {"A": "1"}}},
            "cluster.runtime_env.env_vars = '...': set the actors' environment variables in cluster.env",
        ),
        (
            {"runtime_env": {"pip": ["-i https://me:pw@index"]}},
            "cluster.runtime_env = '...': an address in runtime_env contains a",
        ),
        (
            {"placement": {"strategy": "stack"}},
            r"cluster.placement.strategy = 'stack' is not one of \['spread', 'pack'",
        ),
        ({"placement": {"critic": {}}}, "cluster.placement.critic = {}: there is no such key"),
    ],
)
def test_invalid_placement_of_actors_is_refused(keys: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        config(**keys)
    assert "hf_x" not in str(refused.value)
    assert "pw" not in str(refused.value)


def test_environment_variables_without_secrets_are_accepted() -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "NCCL_SOCKET_IFNAME": "eth0", "VLLM_USE_V1": "1", "KEYBOARD": "de"}
    assert config(env=env).cluster.env == env


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"runtime_env": {"pip": 3}}, r"cluster.runtime_env = \{'pip': 3\}: .*; correct the value"),
        (
            {"placement": {"engine": {"labels": {"a b": "c"}}}},
            r"cluster.placement.engine.labels = \{'a b': 'c'\}: Invalid label key name `a b`.*; correct the value",
        ),
        (
            {"placement": {"reward": {"resource": "GPU"}}},
            "cluster.placement.reward.resource = 'GPU': Use the 'num_cpus' and 'num_gpus' keyword",
        ),
    ],
)
def test_actor_options_that_ray_rejects_are_refused(keys: Mapping[str, Any], sentence: str) -> None:
    cluster.check_actor_options(config(runtime_env={"pip": ["einops"]}).cluster)
    with pytest.raises(ConfigError, match=sentence):
        preflight.preflight(config(**keys), ask=False)


@pytest.mark.parametrize(("key", "value"), [("labels", {"zone": "b"}), ("resource", "rollout")])
def test_placement_of_a_private_cluster_is_refused(key: str, value: object, tmp_path: Path) -> None:
    own = {"labels": {"ray.io/accelerator-type": "H100"}, "resource": "accelerator_type:H100"}
    check_private_placement(parse_config({"cluster": {"placement": {"engine": own}}}))
    placed = {"cluster": {"placement": {"engine": {key: value}}}}
    with pytest.raises(
        ConfigError,
        match=f"cluster.placement.engine.{key} = .*: no node has this, because the single node of a private",
    ):
        preflight.check_addresses(parse_config(placed), str(tmp_path))


def test_missing_cluster_resources_are_reported() -> None:
    node = {"Labels": FAST, "Resources": {"CPU": 2.0, "rollout": 1.0}}
    placed = {"engine": {"labels": FAST}, "scheduler": {"resource": "rollout"}}
    assert list(note_placement(config(placement=placed), [node])) == []
    [labels] = note_placement(config(placement={"engine": {"labels": {"zone": "b"}}}), [node])
    assert labels.startswith("cluster.placement.engine: none of the 1 nodes has zone=b; the actors of this role wait")
    [cpus] = note_placement(config(placement={"reserve_cpus": True}), [node])
    assert cpus.startswith(
        "cluster.placement.reserve_cpus = true: the run's actors need 5 CPUs, and the cluster has 2, "
    )


def test_recipe_may_set_every_placement_key(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[cluster.placement.engine]\nresource = "rollout"\n[cluster.placement.engine.labels]\n"ray.io/x" = "y"\n'
    )
    read = load_recipe(recipe, ["cluster.env.NCCL_DEBUG=WARN", "cluster.placement.strategy=pack"]).cluster
    assert read.placement.engine.labels == {"ray.io/x": "y"}
    assert (read.env, read.placement.strategy) == ({"NCCL_DEBUG": "WARN"}, "pack")


@pytest.mark.soak
def test_engines_run_on_the_nodes_that_the_recipe_names(tmp_path: Path) -> None:
    """Run Ray in a separate process, because Ray reads a cluster's token when it is first imported."""
    head = RayHead(tmp_path / "ray", cpus=2)
    with head, RayNode(head, cpus=4, resources={"rollout": 1}, labels=FAST):
        environment = {**os.environ, **head.env, "ROLLFLOW_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "tests.support.placed", head.address, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    there, used = json.loads(done.stdout.splitlines()[-1])
    assert used["labels"] == used["resource"] == [there]
    assert len(used["pack"]) == 1
    assert len(used["spread"]) == 2
