"""Tests that each contract suite of `rollflow.testing` finds planted faults, and that the failure says in one sentence
what the contract requires.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

import pytest

import rollflow.testing
from rollflow.tasks.learners import build_learner  # noqa: F401 - imported once, and not again in each inner pytest

pytest_plugins = ["pytester"]

QUIET = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")

for suite in rollflow.testing.SUITES:
    importlib.import_module(f"rollflow.testing.{suite}")


@dataclass(frozen=True)
class Fault:
    """The code of a faulty part, the test that must fail, and the sentence that the failure must contain."""

    code: str  # defines `Part`; for parts that the test class builds, defines methods of the test class
    test: str
    sentence: str


SCORER = """
import time
from dataclasses import replace
from rollflow.tasks.scorers.base import Score
calls = []

def right(response, reference):
    return Score(1.0 if response == reference["answer"] else 0.0, "compared")

"""
SCORERS = {
    "NaN": Fault(
        'def part(response, reference) -> Score: return Score(float("nan") if "9" in response else 0.0)',
        "test_score_is_a_finite_number_with_an_outcome",
        "every response must get a score that is a finite number",
    ),
    "loses a response": Fault(
        "def part(responses, references) -> list[Score]: return list(map(right, responses[1:], references[1:]))",
        "test_each_of_many_responses_gets_its_own_score",
        "each response must get one score, in order",
    ),
    "changes the order": Fault(
        "def part(responses, references) -> list[Score]: return list(map(right, sorted(responses), references))",
        "test_each_of_many_responses_gets_its_own_score",
        "each response must get one score, in order",
    ),
    "never returns": Fault(
        "def part(response, reference) -> Score: time.sleep(100)",
        "test_right_answer_gets_full_reward_and_wrong_one_less",
        "a scorer must return",
    ),
    "counts its calls": Fault(
        "def part(response, reference) -> Score: return calls.append(1) or Score(1 / len(calls))",
        "test_score_of_a_response_does_not_depend_on_earlier_ones",
        "a score must depend on the response and its reference only",
    ),
    "changes the reference": Fault(
        'def part(response, reference) -> Score: reference["seen"] = 1; return right(response, reference)',
        "test_scorer_does_not_change_the_reference",
        "a scorer must not change its reference",
    ),
    "blocks the event loop": Fault(
        "async def part(response, reference) -> Score: time.sleep(0.01); return right(response, reference)",
        "test_asynchronous_scorer_never_blocks_the_event_loop",
        "an asynchronous scorer must await and never block",
    ),
    "gives values for another length": Fault(
        "def part(response, reference) -> Score:\n"
        "    return replace(right(response, reference), token_values=[0.5] * 500)",
        "test_values_of_tokens_and_steps_fit_the_response",
        "`token_values` must have the length of the response in tokens, .*: the score has 500 token values",
    ),
    "ends a step behind the response": Fault(
        "def part(response, reference) -> Score:\n"
        "    return replace(right(response, reference), step_values=[(len(response) + 1, 0.5)])",
        "test_values_of_tokens_and_steps_fit_the_response",
        "each of `step_values` must end within the response's text, but for '17': .*: a step must end after 1",
    ),
    "rewards every answer": Fault(
        "def part(response, reference) -> Score: return Score(1.0)",
        "test_right_answer_gets_full_reward_and_wrong_one_less",
        "a wrong answer must get less than a right one",
    ),
}
SCORER_TEST = """
class TestPart(ScorerContract):
    path = "faulty:part"
    reference, right, hang_seconds = {"answer": "17"}, "17", 1.0
"""
ENVIRONMENT = """
import asyncio, time
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.scorers.base import Score

class Base(Environment):
    async def play(self, episode):
        made = await episode.generate()
        return None if made is None else await self.end(episode, made)

    async def end(self, episode, made):
        return await episode.judge(made.tokens)

"""
ENVIRONMENTS = {
    "never ends": Fault(
        "class Part(Base):\n    async def play(self, episode):\n        while True: await episode.generate()",
        "test_episode_generates_and_ends_with_a_finite_reward",
        "an environment must end its episode",
    ),
    "hangs": Fault(
        "class Part(Base):\n    async def end(self, episode, made):\n        while True: pass",
        "test_episode_generates_and_ends_with_a_finite_reward",
        "an episode must return",
    ),
    "blocks": Fault(
        "class Part(Base):\n    async def end(self, episode, made): return time.sleep(0.01) or Score(1.0)",
        "test_environment_never_blocks_the_event_loop",
        "an environment must await and never block, but it called \\['sleep in Part.end'\\]",
    ),
    "gives NaN": Fault(
        'class Part(Base):\n    async def end(self, episode, made):\n        return Score(float("nan"))',
        "test_episode_generates_and_ends_with_a_finite_reward",
        "an episode must end with a score or None, but: .* value is nan",
    ),
    "goes on after the end": Fault(
        "class Part(Base):\n    async def play(self, episode):\n        await episode.generate()\n"
        "        return await episode.judge((1,))",
        "test_ended_episode_is_closed_at_once",
        "after `generate` returned None an environment must return",
    ),
    "adds too much": Fault(
        "class Part(Base):\n    async def end(self, episode, made):\n        episode.add((7,) * 30)\n"
        "        return Score(1.0)",
        "test_episode_ends_with_a_reward_for_any_remaining_context",
        "an environment must not add more than `room` tokens",
    ),
    "keeps state": Fault(
        "class Part(Base):\n    played = 0\n    async def end(self, episode, made):\n        self.played += 1\n"
        "        return Score(1 / self.played)",
        "test_concurrent_episodes_do_not_affect_each_other",
        "an episode must be the same alone and beside others",
    ),
    "catches its cancellation": Fault(
        "class Part(Base):\n    async def play(self, episode):\n        try: return await super().play(episode)\n"
        "        except asyncio.CancelledError: return Score(0.0)",
        "test_cancelled_episode_ends",
        "a cancelled episode must end at once",
    ),
    "rewards no turn": Fault(
        "class Part(Base):\n    async def play(self, episode):\n        episode.reward(1.0)\n"
        "        return await super().play(episode)",
        "test_episode_generates_and_ends_with_a_finite_reward",
        "an environment must give a finite reward after a generation: the episode has no turn that could",
    ),
    "gives an infinite reward": Fault(
        'class Part(Base):\n    async def end(self, episode, made): episode.reward(float("inf"))',
        "test_episode_generates_and_ends_with_a_finite_reward",
        "an environment must give a finite reward after a generation: the reward of a turn is inf",
    ),
    "names a state by a number": Fault(
        "class Part(Base):\n    async def play(self, episode): episode.enter_state(1)",
        "test_episode_generates_and_ends_with_a_finite_reward",
        "an environment must name a state by a string: the key of a state must be a string, not a int",
    ),
    "does not restore its state": Fault(
        "class Part(Environment):\n    async def play(self, episode):\n        said = 0\n"
        "        while said < 3 and await episode.generate(max_tokens=4):\n            said += 1\n"
        "            episode.save_snapshot(bytes([said]))\n        return Score(said / 3) if said == 3 else None",
        "test_episode_continues_from_its_snapshot",
        "an episode that continues from a snapshot must be the same as without a crash",
    ),
    "counts its states": Fault(
        "class Part(Base):\n    played = 0\n    async def play(self, episode):\n        self.played += 1\n"
        "        episode.enter_state(str(self.played))\n        return await super().play(episode)",
        "test_concurrent_episodes_do_not_affect_each_other",
        "an episode must be the same alone and beside others",
    ),
}
ENVIRONMENT_TEST = """
class TestPart(EnvironmentContract):
    path, hang_seconds = "faulty:Part", 1.0
"""
PROMPTS = """
import random
from rollflow.tasks.prompts.base import Question, QuestionSource

class Base(QuestionSource):
    def __init__(self, *, seed, held_out):
        self.seed = seed

    def ask(self, *place):
        text = str(random.Random(f"{self.seed}{place}").random())
        return Question(text, "1", {"answer": "1"})

    def training(self, position):
        return self.ask("training", position)

    def demonstration(self, position):
        return self.ask("demonstration", position)

    def held_out(self, count):
        return [self.ask("held out", i) for i in range(count)]

class Part(Base):
"""
SOURCES = {
    "trains on what is held out": Fault(
        '    def training(self, position): return self.ask("held out" if position == 99 else "t", position % 40)',
        "test_held_out_prompts_are_not_trained_or_demonstrated",
        "no training question and no demonstration may be held out",
    ),
    "demonstrates what is held out": Fault(
        '    def demonstration(self, position): return self.ask("held out" if position == 9 else "d", position)',
        "test_held_out_prompts_are_not_trained_or_demonstrated",
        "no training question and no demonstration may be held out",
    ),
    "holds out a question twice": Fault(
        '    def held_out(self, count):\n        return [self.ask("held out", 0) for _ in range(count)]',
        "test_held_out_prompts_are_not_trained_or_demonstrated",
        "a run refuses this source: .*asks a question twice",
    ),
    "goes on from its last question": Fault(
        "    asked = 0\n    def training(self, position):\n        self.asked += 1\n"
        '        return self.ask("t", self.asked)',
        "test_same_seed_gives_the_same_prompts_in_any_order",
        "a source must give the same question at a position",
    ),
    "draws from the order of a set": Fault(
        '    def training(self, position):\n        return self.ask("t", position, *set("abcdefgh"))',
        "test_another_process_gives_the_same_prompts",
        "a source must give the same questions in every process",
    ),
    "ignores the seed": Fault(
        "    def __init__(self, *, seed, held_out):\n        self.seed = 0",
        "test_different_seed_gives_different_prompts",
        "a source must draw its questions from `seed`",
    ),
    "demonstrates what it trains": Fault(
        '    def demonstration(self, position):\n        return self.ask("training", position)',
        "test_training_and_demonstrations_are_separate_streams",
        "demonstrations must come from another stream",
    ),
}
SOURCE_TEST = """
class TestPart(SourceContract):
    path = "faulty:Part"
"""
OBJECTIVE = """
import torch
from rollflow.tasks.objectives.base import Objective, TokenLoss

class Base(Objective):
    def loss(self, tokens):
        loss_M = self.of(tokens)
        return TokenLoss(loss_M, torch.zeros_like(loss_M, dtype=torch.bool))

"""
OBJECTIVES = {
    "has the wrong sign": Fault(
        "    def of(self, tokens): return tokens.logp_M * tokens.advantage_M",
        "test_good_answers_become_likelier_and_bad_ones_less",
        "a smaller loss must make tokens of positive advantage likelier",
    ),
    "looks at other rows": Fault(
        "    def of(self, tokens): return -tokens.logp_M * tokens.advantage_M * tokens.logp_M.detach().mean().abs()",
        "test_rows_do_not_depend_on_each_other",
        "a row's loss must not depend on other rows",
    ),
    "says by token of a loss by rows": Fault(
        "    by_token = True\n"
        "    def of(self, tokens):\n"
        "        sums = torch.zeros(40, dtype=tokens.logp_M.dtype).index_add(0, tokens.row_M, tokens.behaviour_M)\n"
        "        return tokens.logp_M * tokens.advantage_M * sums[tokens.row_M]",
        "test_by_token_is_true_if_tokens_are_independent",
        "`by_token` must be True exactly if a token's loss depends on that token only",
    ),
    "overflows": Fault(
        "    def of(self, tokens): return -(4 * (tokens.logp_M - tokens.behaviour_M)).exp() * tokens.advantage_M",
        "test_loss_is_finite_for_policies_far_apart",
        "a loss must be finite for policies far apart",
    ),
    "reads what it does not request": Fault(
        "    def of(self, tokens): return -(tokens.logp_M - tokens.proximal_M).exp() * tokens.advantage_M",
        "test_values_that_are_not_requested_are_not_read",
        "an objective must request the values that it reads",
    ),
    "draws": Fault(
        "    def of(self, tokens): return -tokens.logp_M * tokens.advantage_M * torch.rand_like(tokens.logp_M)",
        "test_same_tokens_give_the_same_loss",
        "the same tokens must give the same loss",
    ),
    "has no gradient": Fault(
        "    def of(self, tokens): return -tokens.logp_M.detach() * tokens.advantage_M",
        "test_good_answers_become_likelier_and_bad_ones_less",
        "a run refuses this objective: .* has no gradient",
    ),
    "trains rows of advantage zero": Fault(
        "    def of(self, tokens): return -tokens.logp_M * (tokens.advantage_M + 0.1)",
        "test_row_of_advantage_zero_has_no_gradient",
        "a row of advantage zero must have no gradient",
    ),
}
OBJECTIVE_TEST = """
class TestPart(ObjectiveContract):
    path = "faulty:Part"
"""
STORE = "from rollflow.storage.objects.memory import MemoryStore\n"
STORES = {
    "overwrites": Fault(
        "    def create(self, path, data): self.put(path, data)",
        "test_create_conflicts_with_any_earlier_write",
        "`create` must raise Conflict if the object exists",
    ),
    "checks before it creates": Fault(
        "    def create(self, path, data):\n"
        "        if self.exists(path): raise Conflict(f'{path} exists')\n"
        "        time.sleep(0.05)\n"
        "        self.put(path, data)",
        "test_only_one_of_racing_threads_creates_an_object",
        "exactly one of several racing writers must create an object",
    ),
    "lists in any order": Fault(
        "    def list(self, prefix='', after=''): return iter(list(super().list(prefix, after))[::-1])",
        "test_list_is_sorted_and_contains_only_its_folder",
        "`list` must give all paths, sorted",
    ),
    "reads what is missing": Fault(
        "    def get(self, path): return super().get(path) if self.exists(path) else b''",
        "test_missing_object_raises_an_error",
        "a missing object must raise Missing",
    ),
}
STORE_TEST = """
import time
from rollflow.storage.errors import Conflict
from faulty import MemoryStore

class Part(MemoryStore):
{code}

class TestPart(ObjectStoreContract):
    def build(self, folder):
        return Part(folder.name)
"""
ENGINE = """
from dataclasses import replace
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.base import TokenSpan
from rollflow.tasks.engines.timed import TimedEngine
CONFIG = TimedEngineConfig(median_tokens=400, sigma=0.0, seconds_per_token=0.001, update_seconds=0.0)

class Base(TimedEngine):
    async def generate(self, request):
        return self.change(await super().generate(request))

    def change(self, generation):
        return generation
"""
ENGINES = {
    "drops log-probs": Fault(
        "    def change(self, generation):\n"
        "        made = replace(generation.made, logprobs=generation.logprobs[:-1])\n"
        "        return replace(generation, made=made)",
        "test_generation_names_the_policy_version_in_use",
        "every token must have its log-prob",
    ),
    "names another version": Fault(
        "    def change(self, generation):\n"
        "        made = generation.made\n"
        "        made = TokenSpan.of(made.tokens, made.logprobs, [self.version + 1] * len(made))\n"
        "        return replace(generation, made=made)",
        "test_generation_names_the_policy_version_in_use",
        "a token must have the version of its weights",
    ),
    "ignores aborts": Fault(
        "    async def abort(self, ids): self.check()",
        "test_abort_returns_the_tokens_so_far",
        "`abort` must end a request at once",
    ),
    "ignores a suspension": Fault(
        "    async def suspend(self, in_flight): pass",
        "test_suspended_engine_generates_no_token",
        "between suspend and resume",
    ),
    "answers when it is dead": Fault(
        "    async def resume(self): return None if self._dead else await super().resume()",
        "test_engine_death_fails_every_waiting_call",
        "a dead engine must raise EngineFailed from every call",
    ),
    "shows other tokens while it runs": Fault(
        "    def progress(self, have):\n"
        "        return {id: replace(span, tokens=span.tokens[::-1]) for id, span in super().progress(have).items()}",
        "test_progress_of_a_request_is_a_prefix_of_its_response",
        "progress must be the beginning of the answer",
    ),
}
ENGINE_TEST = """
from rollflow.testing.engines import EngineCase
from faulty import *

class Part(Base):
{code}

class TestPart(EngineContract):
    def build(self):
        return EngineCase(Part(CONFIG))
"""
LEARNER = """
import os
import torch
from rollflow.storage.errors import NotFinite
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.config import TorchTrain
from rollflow.testing.learners import joined

class Base:
    def __init__(self, start):
        self.own = build_learner(TorchTrain(), start)
        self.first = joined(self.own.state())

    def __getattr__(self, name):
        return getattr(self.own, name)
"""
LEARNERS = {
    "forgets its state": Fault(
        "    def load(self, weights, state): self.own.load(weights, self.first)",
        "test_learner_can_go_back_to_an_earlier_state",
        "`load` must restore weights and state, bit for bit",
    ),
    "draws outside of its state": Fault(
        "    def step(self, *given):\n"
        "        metrics = self.own.step(*given)\n"
        "        return dict(metrics) | {'noise': float(os.urandom(1)[0]) + id(given)}",
        "test_restored_learner_takes_the_same_next_steps",
        "the same state and batch must give the same weights, bit for bit",
    ),
    "goes on with NaN": Fault(
        "    def step(self, *given):\n        try: return self.own.step(*given)\n        except NotFinite: return {}",
        "test_batch_that_is_not_finite_is_refused",
        "`step` must raise NotFinite",
    ),
    "calls weights by other names": Fault(
        "    def weights(self): return {name[8:]: data for name, data in self.own.weights().items()}",
        "test_weights_and_state_differ_by_name",
        "names of weights begin with",
    ),
    "changes tensors before it may": Fault(
        "    def step(self, batch, version, settle=lambda: None):\n"
        "        metrics = self.own.step(batch, version)\n"
        "        settle()\n"
        "        return metrics",
        "test_stored_tensors_stay_unchanged_until_they_are_written",
        "`step` must not change a stored tensor before it calls `settle`",
    ),
}
LEARNER_TEST = """
from faulty import *

class Part(Base):
{code}

class TestPart(LearnerContract):
    def build(self, start):
        return Part(start)
"""
KINDS = {
    "scorers": ("ScorerContract", SCORER, SCORERS, SCORER_TEST),
    "environments": ("EnvironmentContract", ENVIRONMENT, ENVIRONMENTS, ENVIRONMENT_TEST),
    "prompts": ("SourceContract", PROMPTS, SOURCES, SOURCE_TEST),
    "objectives": ("ObjectiveContract", OBJECTIVE + "class Part(Base):\n", OBJECTIVES, OBJECTIVE_TEST),
    "objects": ("ObjectStoreContract", STORE, STORES, STORE_TEST),
    "engines": ("EngineContract", ENGINE, ENGINES, ENGINE_TEST),
    "learners": ("LearnerContract", LEARNER, LEARNERS, LEARNER_TEST),
}
SLOW = {("engines", name) for name in ENGINES} | {("learners", name) for name in LEARNERS}
SLOW -= {("engines", "drops log-probs"), ("learners", "goes on with NaN")}
CASES = [
    pytest.param(kind, name, id=f"{kind}: {name}", marks=[pytest.mark.soak] if (kind, name) in SLOW else [])
    for kind, (_, _, faults, _) in KINDS.items()
    for name in faults
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_planted_fault_names_an_existing_contract_test(kind: str) -> None:
    contract, _, faults, _ = KINDS[kind]
    suite = getattr(importlib.import_module(f"rollflow.testing.{kind}"), contract)
    assert [fault.test for fault in faults.values() if not hasattr(suite, fault.test)] == []
    assert len(faults) >= 3


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_planted_fault_fails_its_contract_test_with_a_message(pytester: pytest.Pytester, kind: str, name: str) -> None:
    contract, code, faults, test = KINDS[kind]
    fault = faults[name]
    is_built = "{code}" in test
    pytester.makepyfile(
        faulty=code if is_built else f"{code}{fault.code}\n",
        test_faulty=f"from rollflow.testing.{kind} import {contract}\n{test.replace('{code}', fault.code)}",
    )
    pytester.syspathinsert()
    outcome = pytester.inline_run(*QUIET, f"test_faulty.py::TestPart::{fault.test}")
    failures = [report.longreprtext for report in outcome.getfailures()]
    assert failures, f"the fault was not found: {outcome.countoutcomes()}"
    text = "\n".join(failures)
    pytester.path.joinpath("failures.txt").write_text(text)
    assert re.search(fault.sentence, text), text
