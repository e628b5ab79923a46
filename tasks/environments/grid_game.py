"""Plays a game on a grid: in each turn, the policy writes one letter, and the environment replies with the new
positions of the player and the boxes.

    board in the prompt --> ( one letter of the policy --> what has moved )* --> reward 1 at the goal, else 0

The board comes from the reference of the prompt, so an episode depends only on its prompt and the policy's moves.
"""

from __future__ import annotations

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.base import Environment, Episode, charge_unparsable
from rollflow.tasks.games import read_board
from rollflow.tasks.games.grid import MOVES, GameEnd
from rollflow.tasks.scorers.base import Score

ENDINGS = {GameEnd.GOAL: Score(1.0, "goal", Outcome.CORRECT), GameEnd.HOLE: Score(0.0, "hole", Outcome.WRONG)}


class GridGame(Environment):
    """An environment in which the policy plays a game on the board of the prompt."""

    async def play(self, episode: Episode) -> Score | None:
        """Play until the player is at the goal or in a hole, or until the episode reaches a limit."""
        ports, board = episode.ports, read_board(episode.prompt.reference)
        state = board.start
        while True:
            episode.enter_state(board.write_state(state))
            made = await episode.generate(max_tokens=1)
            if made is None:
                return None
            move = ports.tokenizer.decode_response(made.tokens)
            if move not in MOVES:
                charge_unparsable(episode)
                return Score(0.0, f"unparsable action {move!r}", Outcome.UNPARSABLE)
            state = board.play(state, move)
            if (end := board.find_end(state)) is not None:
                return ENDINGS[end]
            if episode.limit:
                return Score(0.0, episode.limit, Outcome.WRONG)
            message = {"role": "user", "content": board.write_state(state)}
            reply = ports.renderer.render(episode.prompt, episode.response, [message])
            if len(reply) >= episode.room:
                return Score(0.0, "out of tokens", Outcome.WRONG)
            episode.add(reply)
