"""Defines the options of `play` and `evaluate`, which run a policy on prompts, and of `rejudge`, which judges stored
responses again.
"""

from __future__ import annotations

from pathlib import Path

from rollflow.flows.commands.cli.parser import Commands
from rollflow.flows.commands.cli.shared_options import (
    add_recipe_arguments,
    add_run_argument,
    add_set_argument,
    add_store_argument,
    parse_positive,
)


def add_asking(commands: Commands) -> None:
    """Add the commands that run a policy on the prompts of a recipe."""
    play = commands.add(
        "play",
        "Play a recipe's environment in the terminal, turn by turn",
        "You answer, unless an option names another player; at the end of each episode its score is shown. "
        "The command trains nothing and stores nothing.",
        "rollflow play mine.toml --run sorting-a --episodes 3",
    )
    add_recipe_arguments(play)
    player = play.add_mutually_exclusive_group()
    player.add_argument("--random", action="store_true", help="play with a policy that draws each token at random")
    player.add_argument(
        "--run", metavar="RUN", help="let a policy play: a version of this run, or a Hugging Face folder"
    )
    player.add_argument("--endpoint", metavar="URL", help="let a model behind this OpenAI-compatible endpoint play")
    play.add_argument("--version", type=int, metavar="V", help="policy version of --run (default: the newest)")
    add_store_argument(play, "the run of --run")
    play.add_argument("--model", metavar="NAME", help="name of the model at --endpoint")
    play.add_argument("--token-env", metavar="NAME", help="environment variable with the API key of --endpoint")
    episodes = "number of episodes (default: until Ctrl-D if you play, else 1)"
    play.add_argument("--episodes", type=parse_positive, metavar="N", help=episodes)
    play.add_argument("--seed", type=int, metavar="N", help="seed of prompts and players (default: as in the recipe)")
    play.add_argument(
        "--held-out", action="store_true", help="play the held-out prompts instead of the training prompts"
    )

    evaluate = commands.add(
        "evaluate",
        "Measure a policy on a recipe's held-out prompts, without training",
        "The command shows the accuracy with a 95% interval, by domain and evaluation set. Ctrl-C shows what is known.",
        "rollflow evaluate sorting-a mine.toml --version 150",
    )
    who = "id, path or URI of a run, or a Hugging Face folder"
    evaluate.add_argument("run", metavar="RUN|FOLDER", help=who)
    add_recipe_arguments(evaluate)
    evaluate.add_argument("--version", type=int, metavar="V", help="policy version of the run (default: the newest)")
    add_store_argument(evaluate, "the run")
    samples = "responses to each prompt (default: the recipe's evaluation.samples); with more than 1, pass@k is shown"
    evaluate.add_argument("--samples", type=parse_positive, metavar="K", help=samples)
    limit = "ask only the first N held-out prompts of each domain, and the first N of each evaluation set"
    evaluate.add_argument("--limit", type=parse_positive, metavar="N", help=limit)
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file as JSON")


def add_rejudge(commands: Commands) -> None:
    """Add the command that judges stored responses again."""
    rejudge = commands.add(
        "rejudge",
        "Judge stored responses again, and show which verdicts would change",
        "The responses are judged with the scorers of today, or with those of --set. Nothing is written to the run. "
        "The exit code is 1 if a verdict changed, or if a response could not be judged.",
        "rollflow rejudge --last 10 --set reward.decimals=3",
    )
    add_run_argument(rejudge)
    batch = "policy version whose batch is judged again (default: the newest)"
    rejudge.add_argument("version", nargs="?", metavar="VERSION", help=batch)
    rejudge.add_argument("--last", type=parse_positive, metavar="N", help="judge the batches of the newest N versions")
    rejudge.add_argument("--all", action="store_true", help="judge the batches of all policy versions")
    add_set_argument(rejudge, "set a key of a scorer to another value, e.g. reward.deadline_seconds=30")
    rejudge.add_argument(
        "--show", type=parse_positive, default=10, metavar="N", help="number of changed scores to show (default: 10)"
    )
    rejudge.add_argument("--json", action="store_true", help="print the result as one JSON object")
