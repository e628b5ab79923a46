"""Tests the rules of FrozenLake and Sokoban: compares them with a second implementation, and checks them on random
boards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.config import FrozenLakeEnvironment, SokobanEnvironment
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.games import BOARDS, describe_board, read_board
from rollflow.tasks.games.frozen_lake import FrozenLake
from rollflow.tasks.games.grid import CELLS, MOVES, Board, GameEnd, State, find_solution
from rollflow.tasks.games.sokoban import Sokoban
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.games.config import FrozenLakePrompts, SokobanPrompts
from rollflow.tasks.prompts.games.source import GameSource, build_question
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.section import PromptBase
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from rollflow.testing.environments import ScriptedEpisode, build_ports

SOURCES: dict[str, FrozenLakePrompts | SokobanPrompts] = {
    "lake": FrozenLakePrompts(),
    "large lake": FrozenLakePrompts(size=6, holes=0.4, moves=14),
    "room": SokobanPrompts(moves=8),
    "two boxes": SokobanPrompts(size=7, boxes=2, walls=0.1, moves=14),
}
STEPS = {"U": -1j, "D": 1j, "L": -1, "R": 1}  # a second representation of cells: complex numbers


def place(cell: int, size: int) -> complex:
    """Return a cell as a complex number: column plus row times i."""
    return complex(cell % size, cell // size)


def play_by_oracle(board: Board, moves: str) -> tuple[set[complex], complex, GameEnd | None]:
    """Play moves until the game ends; return the boxes, the player, and how the game ended. Cells are complex."""
    inside = {complex(x, y) for x, y in product(range(board.size), repeat=2)}
    goals = {place(cell, board.size) for cell in board.goals}
    marked = {place(cell, board.size) for cell in board.marked}
    *boxes, player = (place(cell, board.size) for cell in board.start)
    standing, lake = set(boxes), isinstance(board, FrozenLake)
    walkable = inside if lake else inside - marked
    for move in moves:
        target = player + STEPS[move]
        behind = target + STEPS[move]
        if target in standing and behind in walkable - standing:
            standing = standing - {target} | {behind}
        if target in walkable and target not in standing:
            player = target
        if lake and player in marked:
            return standing, player, GameEnd.HOLE
        if (lake and player in goals) or (not lake and standing == goals):
            return standing, player, GameEnd.GOAL
    return standing, player, None


@st.composite
def boards(draw: st.DrawFn) -> Board:
    """Draw random boards of both games, with and without a solution."""
    seed = random.Random(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        return FrozenLake.draw(seed, draw(st.integers(2, 6)), draw(st.sampled_from((0.0, 0.2, 0.6))))
    board = Sokoban.draw(
        seed, draw(st.integers(5, 8)), draw(st.sampled_from((0.0, 0.15, 0.4))), draw(st.integers(1, 3))
    )
    assume(board is not None)
    assert board is not None
    return board


@given(boards(), st.text("UDLR", max_size=40))
def test_game_rules_agree_with_a_second_implementation(board: Board, moves: str) -> None:
    boxes, player, end = play_by_oracle(board, moves)
    state, found = board.start, None
    for move in moves:
        state = board.play(state, move)
        if found := board.find_end(state):
            break
    assert ({place(cell, board.size) for cell in state[:-1]}, place(state[-1], board.size), found) == (
        boxes,
        player,
        end,
    )


@given(boards(), st.text("UDLR", max_size=40))
def test_no_move_leaves_the_board_or_enters_a_wall(board: Board, moves: str) -> None:
    state = board.start
    for move in moves:
        state = board.play(state, move)
        assert all(0 <= cell < board.size**2 for cell in state)
        assert len(set(state)) == len(board.start)
        assert list(state[:-1]) == sorted(state[:-1])
        if isinstance(board, Sokoban):
            assert not board.marked & set(state)


@given(boards())
def test_board_is_unchanged_after_write_and_read(board: Board) -> None:
    kind = next(name for name, one in BOARDS.items() if isinstance(board, one))
    assert type(board).read(board.size, board.write()) == board
    assert read_board(describe_board(kind, board, "U")) == board


@given(boards())
def test_solution_is_shortest_and_reaches_the_goal(board: Board) -> None:
    solution = find_solution(board, 6)
    shorter = 6 if solution is None else len(solution) - 1
    assert solution is None or play_by_oracle(board, solution)[2] is GameEnd.GOAL
    tried = min(shorter, 5)  # there are 1,024 sequences of five moves
    assert all(play_by_oracle(board, "".join(moves))[2] is not GameEnd.GOAL for moves in product(MOVES, repeat=tried))


class UnboundedSokoban(Sokoban):
    """Sokoban without a bound on the number of remaining moves, so that the search for a solution tries all states."""

    def bound_moves(self, state: State) -> int:
        return 0


def rooms(boxes: int, walls: float, seed: int) -> Sokoban:
    """Draw a room that is large enough for its boxes."""
    board = Sokoban.draw(random.Random(seed), 6, walls, boxes)
    assume(board is not None)
    assert board is not None
    return board


@given(st.builds(rooms, st.integers(1, 3), st.sampled_from((0.0, 0.1)), st.integers(0, 2**32)), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_bounded_search_finds_solutions_of_the_shortest_length(board: Sokoban, longest: int) -> None:
    plain = UnboundedSokoban(board.size, board.goals, board.marked, board.start)
    expected, found = find_solution(plain, longest), find_solution(board, longest)
    assert (found is None, len(found or "")) == (expected is None, len(expected or ""))
    state = board.start
    for played, move in enumerate(found or "", 1):
        assert board.bound_moves(state) <= len(found or "") - played + 1
        state = board.play(state, move)
    assert found is None or board.bound_moves(state) == 0


def test_sokoban_move_bound_matches_a_hand_calculation() -> None:
    """The player takes one step to a box on cell f or g, and pushes each of the two boxes two cells to its goal."""
    assert Sokoban.read(4, "no/:fga").bound_moves((5, 6, 0)) == 1 + 4
    assert Sokoban.read(4, "no/:fga").bound_moves((13, 14, 0)) == 0


def test_random_shortest_solutions_have_equal_length() -> None:
    board = FrozenLake(4, frozenset((15,)), frozenset(), (0,))
    found = {find_solution(board, 6, random.Random(seed)) for seed in range(60)}
    assert {len(one or "") for one in found} == {6}
    assert len(found) > 5
    assert find_solution(board, 5) is None


def test_moves_in_a_small_room_match_a_hand_example() -> None:
    """The box is at the upper edge of the room; only a push downwards moves it."""
    board = Sokoban.read(3, "h/:be")
    assert board.play(board.start, "U") == (1, 4)  # the box cannot be pushed beyond the edge
    assert board.play((4, 1), "D") == (7, 4)
    assert board.find_end((7, 4)) is GameEnd.GOAL
    assert Sokoban.read(3, "h/h:be").play((4, 1), "D") == (4, 1)


@pytest.mark.parametrize("text", ["", "a", "a/b", "a/b:", "/:a", "z/:a", "a/:z", "A/:b", "a/b:c/"])
def test_text_that_is_not_a_board_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not describe a board of size 2"):
        FrozenLake.read(2, text)


@pytest.mark.parametrize("config", SOURCES.values(), ids=SOURCES)
def test_demonstrated_turns_solve_the_board(config: FrozenLakePrompts | SokobanPrompts) -> None:
    source = GameSource(config, 1, 30, HeldOut())
    for question in [*source.held_out(30), *map(source.training, range(30)), *map(source.demonstration, range(30))]:
        board = read_board(question.reference)
        assert question.text == board.write()
        assert len(question.answer) <= config.moves
        assert play_by_oracle(board, question.answer)[2] is GameEnd.GOAL
        assert [turn.said for turn in question.turns] == list(question.answer)
        state = board.start
        for turn in question.turns[:-1]:
            state = board.play(state, turn.said)
            assert [reply["content"] for reply in turn.replies] == ["".join(CELLS[cell] for cell in state)]
        assert question.turns[-1].replies == ()


class Moves(ScriptedEpisode):
    """An episode in which the policy says one scripted letter per turn."""

    moves = ""

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        assert max_tokens == 1
        self.said, self.moves = self.moves[0], self.moves[1:]
        return await super().generate(stop, max_tokens)


LAKE = FrozenLake.read(3, "i/e:a")  # start a, goal i, a hole in the middle
ROOM = Sokoban.read(5, "h/:gf")  # in the second row, the box stands between the player and the goal


def play(board: Board, moves: str, turns: int = 6, longest: int = 40) -> tuple[Score | None, str]:
    """Play scripted moves in the environment of a board; return the score and the response."""
    lake = isinstance(board, FrozenLake)
    config = FrozenLakeEnvironment(max_turns=turns) if lake else SokobanEnvironment(max_turns=turns)
    question = build_question(config.kind, board, "U")
    prompt = Prompt("p", 0, "test", question.text, ModelInput.of((1,)), question.reference)
    episode = Moves(build_ports(config), prompt, longest=longest)
    episode.moves = moves
    score = run_virtual(build_environment(config).play(episode))
    assert not episode.fault
    return score, "".join(map(chr, episode.response))


@pytest.mark.parametrize(
    ("board", "moves", "reason", "response"),
    [
        (LAKE, "RRDD", "goal", "RbRcDfD"),
        (LAKE, "UDR", "hole", "UaDdR"),
        (LAKE, "UUUUUU", "the episode reached environment.max_turns = 6", "UaUaUaUaUaU"),
        (LAKE, "Rd", "unparsable action 'd'", "Rbd"),
        (ROOM, "R", "goal", "R"),
        (ROOM, "DLU\n", "unparsable action '\\n'", "DgkLgkUgf\n"),
    ],
)
def test_episode_ends_with_its_outcome_and_reason(board: Board, moves: str, reason: str, response: str) -> None:
    score, said = play(board, moves)
    assert score is not None
    assert (score.reason, said) == (reason, response)
    assert score.value == (reason == "goal")
    outcomes = {"goal": Outcome.CORRECT, "unparsable": Outcome.UNPARSABLE}
    assert score.outcome is outcomes.get(reason.split()[0], Outcome.WRONG)


@pytest.mark.parametrize("longest", range(1, 8))
def test_episode_without_room_for_a_move_ends(longest: int) -> None:
    score, said = play(LAKE, "RRDD", longest=longest)
    assert score is not None
    assert score.reason == ("goal" if longest == 7 else "out of tokens")
    assert len(said) == longest - (longest % 2 == 0)


@given(boards(), st.text("UDLR", min_size=12, max_size=12), st.integers(1, 12))
@settings(deadline=None)
def test_episode_ends_as_the_rules_of_the_game_say(board: Board, moves: str, turns: int) -> None:
    end = play_by_oracle(board, moves[:turns])[2]
    score, _ = play(board, moves, turns=turns, longest=200)
    assert score is not None
    assert score.reason == (end or f"the episode reached environment.max_turns = {turns}")


LAKES = {"size": st.integers(2, 6), "holes": st.floats(0, 0.99), "moves": st.integers(1, 20)}
ROOMS = {"size": st.integers(5, 6), "walls": st.floats(0, 0.5), "boxes": st.integers(1, 2), "moves": st.integers(1, 12)}


def test_random_game_tests_cover_every_config_key() -> None:
    for keys, section in ((LAKES, FrozenLakePrompts), (ROOMS, SokobanPrompts)):
        assert keys.keys() == section.model_fields.keys() - PromptBase.model_fields.keys() - {"kind"}
    drawn = {"kind", *LimitedEnvironment.model_fields}  # test_episode_limits.py draws the limits
    assert FrozenLakeEnvironment.model_fields.keys() == SokobanEnvironment.model_fields.keys() == drawn


@given(
    st.builds(FrozenLakePrompts, **LAKES) | st.builds(SokobanPrompts, **ROOMS),  # type: ignore[arg-type]
    st.integers(0, 3),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
def test_random_settings_give_solvable_boards_or_a_clear_error(
    config: FrozenLakePrompts | SokobanPrompts, count: int, seed: int
) -> None:
    questions, refused = list[Question](), ""
    try:
        source = GameSource(config, seed, count, HeldOut())
        questions = [*source.held_out(count), source.training(0), source.demonstration(0)]
    except ConfigError as error:
        refused = str(error)
    assert questions or refused.startswith((f"prompts.size = {config.size}: ", "evaluation.prompts: "))
    for question in questions:
        assert 1 <= len(question.answer) <= config.moves
        assert play_by_oracle(read_board(question.reference), question.answer)[2] is GameEnd.GOAL
    held_out = {question.key for question in questions[:-2]}
    assert len(held_out) == len(questions[:-2])
    assert not held_out & {question.key for question in questions[-2:]}


def test_source_without_solvable_boards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompts\.size = 5: none of 10000 boards of sokoban can be solved"):
        GameSource(SokobanPrompts(size=5, boxes=3, walls=0.5, moves=1), 0, 1, HeldOut())


def test_source_whose_boards_are_all_held_out_is_refused() -> None:
    source = GameSource(FrozenLakePrompts(size=2, holes=0.0), 0, 100, HeldOut())
    assert len(source.held_out(100)) == 12
    with pytest.raises(ConfigError, match="12 boards are held out, and no other board of frozen-lake is left"):
        source.training(0)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"environment": {"kind": "sokoban"}}, r"prompts\.0\.kind.*frozen-lake.*set environment\.kind = "),
        ({}, r"prompts\.0\.kind.*frozen-lake.*set environment\.kind = "),
        (
            {"environment": {"kind": "frozen-lake", "max_turns": 9}},
            r"prompts\.0\.moves.*10.*environment\.max_turns = 9",
        ),
        ({"prompts": [{"kind": "sorting"}], "environment": {"kind": "sokoban"}}, r"environment\.kind.*sokoban"),
    ],
)
def test_environment_of_another_game_is_refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"prompts": [{"kind": "frozen-lake"}], **tree})
