"""Tests `rollflow inspect` for a trajectory with several turns: the author and the versions of each part."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.inspect import _describe_optional
from rollflow.flows.tracking.mlflow_payload import _sample_responses
from rollflow.flows.views.inspect_values import describe_token_rewards, write_newest_episodes
from rollflow.flows.views.turns import choose_episodes, prompt_tokens, render_part, split_turns, write_episode
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.model_input import NO_TOKEN, ForeignPart, PlacedPart
from rollflow.storage.optional_columns import NAMES
from rollflow.storage.records import Branch, GroupKey, Outcome, StopReason, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Float32s, Int16s, Int64s, TokenSets
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.run.context import RunContext
from tests.support import small_run
from tests.support.small_run import prepare_small, train_small

PROMPT, FIRST, HINT, SECOND = "How many?", "five", "Look again.", "six"


def two_turns(context: RunContext, of: Trajectory) -> Trajectory:
    """Make a trajectory of two turns. Two versions have generated the first turn; the environment's hint is between the
    turns.
    """
    asked, said, hint, then = (context.tokenizer.encode(text) for text in (PROMPT, FIRST, HINT, SECOND))
    versions = [0] * (len(said) - 1) + [1]
    quiet = len(asked)
    return Trajectory(
        of.sample,
        0,
        [*asked, *said, *hint, *then],
        [False] * quiet + [True] * len(said) + [False] * len(hint) + [True] * len(then),
        [0.0] * quiet + [-1.0] * (len(said) - 1) + [-3.0] + [0.0] * len(hint) + [-2.0] * len(then),
        [-1] * quiet + versions + [-1] * len(hint) + [1] * len(then),
        of.reward,
        of.reason,
        StopReason.STOP,
    )


def with_values(of: Trajectory) -> Trajectory:
    """Return a copy of a trajectory with a value in every optional column. The first trajectory gets no outcome and no
    reward parts.
    """
    starts = [place for place, chosen in enumerate(of.loss_mask) if chosen and not of.loss_mask[place - 1]]
    own = [[token] if chosen else [] for token, chosen in zip(of.tokens, of.loss_mask, strict=True)]
    more = replace(
        of, turn_starts=starts, routed_experts=Int16s.same(3, 2 * len(of.tokens)), kept_tokens=TokenSets.of(own)
    )
    if of.sample == 0:
        return more
    more = replace(more, turn_states=Int64s.of([7, -8]), role="buyer")
    rewards = Float32s.of([0.5 if chosen else math.nan for chosen in of.loss_mask])
    more = replace(more, token_rewards=rewards)
    return replace(more, outcome=Outcome.PARTIAL, reward_parts={"answer": 1.0, "format": 0.25})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Make a run of two versions. In the second batch, each trajectory has two turns, and one group has optional
    values.
    """
    home = tmp_path_factory.mktemp("home")
    made = small_run.batch

    def batch(context: RunContext, number: int, **given: Any) -> StagedBatch:
        staged = made(context, number, **given)
        if number != 1:
            return staged
        groups = [replace(g, trajectories=tuple(two_turns(context, t) for t in g.trajectories)) for g in staged.groups]
        groups[1] = replace(groups[1], trajectories=tuple(map(with_values, groups[1].trajectories)))
        return replace(staged, groups=tuple(groups))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.setenv("COLUMNS", "160")
        patch.setattr(small_run, "batch", batch)
        context = prepare_small(home, versions=2)
        train_small(context)
        yield context


def test_inspect_command_shows_each_turn_of_an_episode(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "small", "2.0.1"]) == 0
    out = re.sub(r"[ \n]+", " ", capsys.readouterr().out)
    decode, encode = run.tokenizer.decode, run.tokenizer.encode
    asked, said, hint, then = (len(encode(text)) for text in (PROMPT, FIRST, HINT, SECOND))
    a, b, c, d = asked, asked + said, asked + said + hint, asked + said + hint + then
    mean = -(said - 1 + 3) / said
    for words in (
        f"question {decode(encode(PROMPT))} ",
        f"turns prompt · {a} tokens (0-{a - 1}) {PROMPT} policy",
        f"policy · turn 1 · {said} tokens ({a}-{b - 1}) · versions 0 ({said - 1}), 1 (1) · "
        f"log-prob mean {mean:.2f}, lowest -3.00 {FIRST} environment",
        f"environment · {hint} tokens ({b}-{c - 1}) {HINT} policy",
        f"policy · turn 2 · {then} tokens ({c}-{d - 1}) · version 1 · log-prob mean -2.00, lowest -2.00 {SECOND}",
    ):
        assert words in out, out
    assert "response" not in out.split("turns")[0].split("discarded")[-1]


def test_inspect_prints_turns_as_json(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "small", "2.0.1", "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["trajectories"]
    assert [turn["by"] for turn in one["turns"]] == ["prompt", "policy", "environment", "policy"]
    assert [turn["text"] for turn in one["turns"]] == [PROMPT, FIRST, HINT, SECOND]
    assert [turn["loss_mask"] for turn in one["turns"]] == [False, True, False, True]
    assert sum(turn["tokens"] for turn in one["turns"]) == len(one["tokens"])
    assert (one["question"], one["response"]) == (PROMPT, FIRST + SECOND)
    assert one["turns"][3]["logprob_mean"] == one["turns"][3]["logprob_min"] == -2.0


def test_page_shows_two_episodes_turn_by_turn(run: RunContext) -> None:
    text = write_newest_episodes(run)
    assert text.startswith("Version 2, highest and lowest reward\n\n### Prompt ")
    shown = text.split("### Prompt ")[1:]
    rewards = [float(re.findall(r"reward ([-\d.e]+),", one)[0]) for one in shown]
    [version] = list(run.policies.since(2))
    batch = TrajectoryBatch.from_bytes(run.batches.read(run.batches.read_commit(version.batch_entry or 0).file))
    every = [one.reward for group in batch.groups() for one in group.trajectories]
    assert rewards == [max(every), min(every)][: 2 - (max(every) == min(every))]
    for one in shown:
        places = [one.index(f"```\n{part}\n```") for part in (PROMPT, FIRST, HINT, SECOND)]
        assert places == sorted(places)
        assert [one.count(f"**{author}**") for author in ("prompt", "policy", "environment")] == [1, 2, 1]


def test_page_shows_all_branches_of_an_episode() -> None:
    first = Trajectory(0, 0, [1, 2], [False, True], [0.0, -1.0], [-1, 0], 1.0, "done", StopReason.STOP)
    later = replace(first, sample=2, tokens=[1, 3], branch=Branch(0, 1))
    other = replace(first, sample=1, reward=0.5)
    group = TrajectoryGroup(GroupKey(7, 0), "p", "d", (first, other, later))
    [(key, best), (_, worst)] = choose_episodes([group])
    assert (key, [one.sample for one in best], [one.sample for one in worst]) == (GroupKey(7, 0), [0, 2], [1])
    text = write_episode(key, best, lambda tokens: "```".join(map(str, tokens)) * 3000)
    assert text.startswith("### Prompt 7.0.0: reward 1")
    assert text.count("**policy**") == 2
    assert "characters are left out" in text
    assert choose_episodes([]) == []


def test_prompts_in_mlflow_samples_contain_no_environment_text(run: RunContext) -> None:
    assert set(_sample_responses(run, run.policies.find(2))["prompt"]) == {PROMPT}


def test_single_turn_is_split_into_prompt_and_response(run: RunContext) -> None:
    prompt = run.prompts().prompt(0)
    one = small_run.trajectory(tuple(prompt.tokens), 0, 0, 0, Random(0), stop=3)
    assert [part.author for part in split_turns(one)] == ["prompt", "policy"]
    assert [token for part in split_turns(one) for token in part.tokens] == list(one.tokens)


def test_inspect_shows_outcome_and_reward_parts(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "small", "3.0"]) == 0
    group = capsys.readouterr().out
    assert re.search(r"sample . reward . reward parts +. outcome . role +. ending", group), group
    assert len(re.findall(r"answer 1, format 0.25 . partial . buyer ", group)) == small_run.SIZE - 1
    assert main(["inspect", "small", "3.0.1"]) == 0
    out = re.sub(r"[ \n]+", " ", capsys.readouterr().out)
    assert "reward parts answer 1, format 0.25 token rewards 0.5 at token 0, 0.5 at token 1," in out
    assert "outcome partial role buyer ending" in out
    for name in ("2.0", "2.0.1", "3.0.0"):
        assert main(["inspect", "small", name]) == 0
        assert ("outcome" in capsys.readouterr().out) is False


def test_inspect_sums_the_rewards_of_tokens() -> None:
    one = small_run.trajectory((4, 5), 3, 0, 0, Random(0), stop=3)
    own = sum(one.loss_mask)
    rewards = [math.nan] * (len(one.tokens) - own) + [1.0, *[math.nan] * (own - 1)]
    assert describe_token_rewards(replace(one, token_rewards=Float32s.of(rewards))) == "1 at token 0 (sum 1)"
    mask, many = [True] * 12, Float32s.of([0.25] * 12)
    shown = describe_token_rewards(replace(one, loss_mask=mask, token_rewards=many))
    assert shown.endswith("0.25 at token 7, and 4 more (sum 3)")


def test_inspect_prints_optional_values_as_json(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "small", "3.0", "--json"]) == 0
    first, second, *_ = json.loads(capsys.readouterr().out)["trajectories"]
    assert (second["outcome"], second["reward_parts"]) == ("partial", {"answer": 1.0, "format": 0.25})
    assert [len(second[name]) for name in ("kept_tokens", "turn_starts")] == [len(second["tokens"]), 2]
    assert second["turn_states"] == [7, -8]
    assert (second["role"], "role" in first) == ("buyer", False)
    assert second["token_rewards"] == [0.5 if chosen else None for chosen in second["loss_mask"]]
    assert second["routed_experts"] == [3] * 2 * len(second["tokens"])
    assert {"outcome", "reward_parts", "branch"} & {*first} == {"branch"} & {*second} == set()
    assert main(["inspect", "small", "2.0.1", "--json"]) == 0
    assert set(NAMES) & {*json.loads(capsys.readouterr().out)["trajectories"][0]} == set()


def test_inspect_names_the_role_of_a_trajectory() -> None:
    one = replace(small_run.trajectory((4, 5), 3, 0, 0, Random(0), stop=3), role="seller", branch=Branch(0, 2))
    assert [*_describe_optional(one)] == [("role", "seller"), ("branch", "of sample 0, from token 2 on")]


def test_inspect_describes_an_image_in_a_prompt() -> None:
    image = PlacedPart(1, ForeignPart("image", "5e" * 32, 2))
    one = replace(small_run.trajectory((4, NO_TOKEN, NO_TOKEN, 5), 3, 0, 0, Random(0), stop=3), foreign_parts=(image,))
    prompt = split_turns(one)[0]
    assert (prompt.readable, len(prompt.tokens)) == (prompt_tokens(one), 4) == ([4, 5], 4)
    assert prompt.value(str)["text"] == "[4, 5]"
    assert [*_describe_optional(one)] == [("image", "at position 1, 2 positions, sha256 5e5e5e5e5e5e")]


def test_inspect_shows_where_a_branch_of_a_response_begins() -> None:
    one = small_run.trajectory((1, 2), 3, 0, 0, Random(0), stop=3)
    assert [*_describe_optional(replace(one, branch=Branch(1, 2)))] == [("branch", "of sample 1, from token 2 on")]


def test_adjacent_turns_are_shown_as_separate_parts(run: RunContext) -> None:
    one = small_run.trajectory((4, 5), 3, 0, 0, Random(0), stop=3)
    given, own = len(one.tokens) - sum(one.loss_mask), sum(one.loss_mask)
    assert own >= 2
    rewards = [math.nan] * given + [math.nan, 0.25, *[math.nan] * (own - 2)]
    starts = (given, given + 1)
    [_, first, second] = split_turns(replace(one, turn_starts=starts, token_rewards=Float32s.of(rewards)))
    assert (first.turn, len(first.tokens), first.reward) == (1, 1, None)
    assert (second.turn, len(second.tokens), second.reward) == (2, own - 1, 0.25)
    assert "reward 0.25" in second.notes
    assert second.value(str)["reward"] == 0.25
    assert [part.author for part in split_turns(one)] == ["prompt", "policy"]


def test_branch_of_a_response_begins_with_its_rewritten_context() -> None:
    one = replace(small_run.trajectory((1, 2), 3, 0, 0, Random(0), stop=3), branch=Branch(1, 2))
    assert [part.author for part in split_turns(one)] == ["context", "policy"]


@given(
    authors=st.lists(st.booleans(), min_size=1, max_size=30), cuts=st.sets(st.integers(0, 29)), branched=st.booleans()
)
def test_trajectory_parts_contain_each_token_exactly_once(authors: list[bool], cuts: set[int], branched: bool) -> None:
    starts = sorted(at for at in cuts if at < len(authors) and authors[at])
    one = replace(
        small_run.trajectory((1, 2), 3, 0, 0, Random(0), stop=3),
        tokens=list(range(len(authors))),
        loss_mask=authors,
        logprobs=[-1.0 * own for own in authors],
        versions=[own - 1 for own in authors],
        turn_starts=starts,
        branch=Branch(0, 1) if branched else None,
    )
    parts = split_turns(one)
    assert [token for part in parts for token in part.tokens] == list(one.tokens)
    assert all(authors[token] is (part.author == "policy") for part in parts for token in part.tokens)
    assert {*starts} <= {part.start for part in parts}
    turns = [part.turn for part in parts if part.author == "policy"]
    assert turns == list(range(1, len(turns) + 1))


def test_environment_text_keeps_its_line_breaks_on_the_terminal() -> None:
    console = Console(width=40, no_color=True)
    with console.capture() as shown:
        console.print(render_part("environment", "#####\n#. @#\n#####\n", ["3 tokens"]))
    lines = [line.rstrip() for line in shown.get().splitlines()]
    assert lines == ["environment · 3 tokens", "  #####", "  #. @#", "  #####"]


@given(st.text(st.characters(max_codepoint=0xA0)))
def test_environment_text_cannot_control_the_terminal(text: str) -> None:
    console = Console(width=4000, no_color=True)
    with console.capture() as shown:
        console.print(render_part("environment", "\x1b]0;title\x07\x1b[2J\x9b31m" + text))
    assert "\\x1b]0;title\\x1b[2J\\x9b31m" in shown.get()
    assert all(one.isprintable() or one in "\n\t" for one in shown.get() if one != "\xa0")
