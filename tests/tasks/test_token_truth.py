"""Trained tokens, with vLLM: each has the context with which the engine sampled it, and the right log-prob.

Episodes have several turns of a chat with thoughts and tool calls. The chat template writes the schema of the tool, and
removes thoughts of earlier turns before a new question of the user, so episodes have branches.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import GroupKey, Prompt, TrajectoryGroup
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.vllm.engine import VllmEngine
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.group import GroupPorts, GroupRollout
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, VersionedGeneration, WeightsProbe
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.policy_folders import make_folder

# As Qwen3: thoughts stay within an answer of several tool calls, and are removed before the user's next question.
TEMPLATE = """
{%- if tools %}<|turn|>system
{{ tools | tojson }}<|over|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|turn|>{{ m['role'] }}
{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in m['content'] -%}
{{ m['content'].split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m['content'] }}{% endif %}<|over|>
{% endfor %}{% if add_generation_prompt %}<|turn|>assistant
{% endif %}"""
PLACE = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PLACE}}
LONGEST, GROUP = 512, 4
TOLERANCE = 1e-4  # nats
NO_OPTIONS = RequestOptions()


class Talk(Environment):
    """A few turns with a thought, then a tool call or an answer, whose tags the environment writes."""

    async def play(self, episode: Episode) -> Score | None:
        draw = random.Random(sum(episode.prompt.tokens))
        episode.replace_prompt(episode.ports.renderer.render_opening(episode.prompt, [LOOK], " Look first."))
        for number in range(draw.randint(2, 5)):
            begun, asks = len(episode.response), draw.random() < 0.5
            if draw.random() < 0.7 and not await self.say(episode, "<think>\n", "\n</think>\n\n"):
                return Score(0.5)
            call = ('<tool_call>{"name": "look", "arguments": {"at": "', '"}}</tool_call>') if asks else ("", "")
            if not await self.say(episode, *call):
                return Score(0.5)
            episode.enter_state(str(number))
            action = episode.read_action(episode.response[begun:])
            message = {"role": "tool" if asks else "user", "content": action.fault or f"seen {number}"}
            if not episode.extend([message]):
                return Score(0.25)
        made = await episode.generate(max_tokens=8)
        return None if made is None else await episode.judge(made.tokens)

    async def say(self, episode: Episode, before: str, after: str) -> bool:
        """Let the policy say a few tokens between two texts of the environment."""
        tokenizer = episode.ports.tokenizer
        first, last = tokenizer.encode_response(before), tokenizer.encode_response(after)
        if len(first) + len(last) + 16 > episode.room:
            return False
        episode.add(first)
        if await episode.generate(max_tokens=random.Random(len(episode.response)).randint(1, 8)) is None:
            return False
        episode.add(last)
        return True


@dataclass
class Recording(InferenceProxy):
    """A proxy that remembers the context and the tokens of each generation."""

    engine: VllmEngine
    sampled: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__([self.engine], 64)

    async def generate(self, request: GenerationRequest, asked: RequestOptions = NO_OPTIONS) -> VersionedGeneration:
        found = await super().generate(request, asked)
        self.sampled.append((request.prompt.flat.data, found.generation.tokens.data))
        return found


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Recording]:
    engine = VllmEngine(VllmEngineConfig(temperature=1.0, max_new_tokens=LONGEST), folder)
    await engine.start()
    try:
        proxy = Recording(engine)
        await proxy.update(0, folder, WeightsProbe((), (), 0.0), "continue")
        yield proxy
    finally:
        await engine.close()


def build_prompts(tokenizer: PolicyTokenizer, count: int) -> list[Prompt]:
    found = []
    for number in range(count):
        messages = [{"role": "user", "content": f"What is {number} + 2?"}]
        tokens = tokenizer.encode(messages, chat=True)
        found.append(Prompt(str(number), number, "chat", "", ModelInput.of(tokens), messages=messages))
    return found


async def roll_out(proxy: Recording, tokenizer: PolicyTokenizer, prompts: Sequence[Prompt]) -> list[TrajectoryGroup]:
    async def score(request: ScoreRequest) -> Score:
        return Score(float(len(request.tokens) % 2))

    async def note(_: int) -> None: ...

    limits = RolloutLimits(0, 1, 1, GROUP, 0.0, 99, 1, LONGEST, 1.0)
    ports = GroupPorts(
        limits, proxy, score, note, lambda *_: None, Talk(),
        environment_ports=EnvironmentPorts(tokenizer, PolicyRenderer(tokenizer, {"chat"})),
    )  # fmt: skip
    room = asyncio.Semaphore(16)

    async def run(prompt: Prompt) -> TrajectoryGroup:
        async with room:
            found = await GroupRollout(GroupKey(prompt.index, 0), ports, GROUP, prompt.index, awaited=False).run(prompt)
        assert isinstance(found, TrajectoryGroup)
        return found

    return list(await asyncio.gather(*map(run, prompts)))


def worst_difference(folder: Path, data: BatchRows) -> float:
    """Return the largest difference of a behaviour log-prob from the log-prob of transformers, which reads the row as
    the learner does."""
    model, worst = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0
    with torch.no_grad():
        for row in range(len(data.rewards)):
            begin, end = data.offsets[row : row + 2]
            tokens = torch.from_numpy(data.tokens[begin:end].astype(np.int64))
            own = slice(data.starts[row], data.starts[row + 1])
            place = torch.from_numpy(data.chosen[own] - begin)
            logprobs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)[place - 1, tokens[place]]
            worst = max(worst, float((logprobs - torch.from_numpy(data.behaviour[own])).abs().max()))
    return worst


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("episodes", [24, pytest.param(1000, marks=pytest.mark.soak)])
async def test_trained_tokens_have_the_context_they_were_sampled_with(tmp_path: Path, episodes: int) -> None:
    folder = make_folder(tmp_path / "policy", "qwen3", tokenizer={"template": TEMPLATE}, max_position_embeddings=640)
    tokenizer = PolicyTokenizer(folder, 0.0)
    async with serving(folder) as proxy:
        groups = await roll_out(proxy, tokenizer, build_prompts(tokenizer, episodes // GROUP))
    batch = TrajectoryBatch.from_bytes(TrajectoryBatch.from_groups([pack_group(group) for group in groups]).to_bytes())
    data = BatchRows.of(batch)

    trained = Counter[tuple[bytes, bytes]]()
    for group in groups:
        for one in group.trajectories:
            assert one.turn_starts is not None
            for start in one.turn_starts:
                end = next((at for at in range(start, len(one.tokens)) if not one.loss_mask[at]), len(one.tokens))
                trained[one.tokens[:start].data, one.tokens[start:end].data] += 1  # type: ignore[attr-defined]
    assert trained == Counter(proxy.sampled)
    sampled = sum(len(tokens) // 4 for _, tokens in proxy.sampled)
    worst = worst_difference(folder, data)
    print(
        json.dumps(
            {
                "episodes": batch.episodes, "trajectories": len(batch), "turns": len(proxy.sampled),
                "sampled tokens": sampled, "delivered fraction": len(data.chosen) / sampled, "worst nats": worst,
            }
        )
    )  # fmt: skip
    assert batch.episodes == episodes
    assert len(batch) > episodes, "the chat template rewrote no thought"
    assert len(data.chosen) == sampled
    assert all('"name": "look"' in tokenizer.decode(group.trajectories[0].tokens) for group in groups)
    assert worst < TOLERANCE
