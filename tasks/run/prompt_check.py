"""Checks, before a run begins, that each prompt fits the policy and that its responses can be scored.

    read_files    checks every row of every file: types, emptiness, and a reference that the verifier can score
    fit_files     checks every row as the policy reads it: it is not empty and leaves room for a response
    probe_sources does the same for the first questions of sources that generate them

Errors name the line of a wrong row and the number of such rows. A row that is too long is an error unless
`prompts.too_long = "drop"`, which removes such rows for every process.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.config import EnvironmentConfig, MixedEnvironment, SingleTurnEnvironment
from rollflow.tasks.environments.mixed import explain_name
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.prompts.config import FileBase
from rollflow.tasks.prompts.jsonl import JsonlSource, numbered_lines
from rollflow.tasks.prompts.messages import apply_template
from rollflow.tasks.prompts.rows import PromptRow, read_rows, refuse_lines, shorten_value
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.section import PromptBase
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.code.pytest_case import has_pytest_file, try_testers
from rollflow.tasks.scorers.config import (
    CodeReward,
    ExactReward,
    MathsReward,
    ReasoningGymReward,
    RewardConfig,
    name_section,
    split_scorer,
)
from rollflow.tasks.scorers.reference_process import ReferenceChecker
from rollflow.tasks.scorers.verifier import Verifier, answer_of, score_response

PROBED = 256  # number of questions that are checked for each prompt source that generates questions
TELL_SECONDS = 3.0  # seconds between two progress messages
CURE = 'shorten it, lower engine.max_new_tokens, or set prompts.too_long = "drop"'
WORKED = "####"  # marks the final answer of a worked solution in GSM8K and similar data sets
Rows = Mapping[FileBase, list[PromptRow]]
Tell = Callable[[str], None]


def read_files(config: RunConfig, read: Reader) -> Rows:
    """Read and check the rows of every prompt file of the run.

    Raises:
        ConfigError: a row of a prompt file has no usable prompt, or its responses cannot be scored.
    """
    sources = [source for source in config.prompts if isinstance(source, FileBase)]
    files = dict.fromkeys(file for source in sources for file in source.files)
    with ReferenceChecker() as checker:
        rows: dict[FileBase, list[PromptRow]] = {
            file: read_rows(file, read(file), _Judgeable(config, file, checker)) for file in files
        }
    for source, found in rows.items():
        rewards = [_find_reward(config, source, row.reference) for row in found]
        if all(isinstance(reward, ExactReward | MathsReward) for reward in rewards):
            _check_worked(source, found, rewards[0].kind)
    return rows


def _find_reward(config: RunConfig, source: PromptBase, reference: Mapping[str, Any]) -> RewardConfig:
    return config.scorers[source.scorer_of(reference)]


def try_pytest_cases(config: RunConfig, asked: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Start pytest in the sandboxes of scorers that run pytest files; `asked` has pairs of a scorer's name and a
    reference. Nothing is tried if the run uses another Ray cluster, because the sandboxes run on the nodes of that
    cluster.

    Raises:
        ConfigError: this machine cannot run pytest in the sandboxes of a scorer.
    """
    tried = list[CodeReward]()
    for name, reference in asked if config.cluster.address == "auto" else ():
        if not has_pytest_file(reference):
            continue
        for section, scorer in split_scorer(name_section(name), config.scorers[name]).items():
            if isinstance(scorer, CodeReward) and scorer.sandbox not in [one.sandbox for one in tried]:
                tried.append(scorer)
                try:
                    try_testers(scorer.sandbox)
                except ConfigError as error:
                    raise ConfigError(f"{section}.{error}") from None


def list_asked(rows: Rows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of the scorer and the reference of each row of the prompt files."""
    for source, found in rows.items():
        yield from ((source.scorer_of(row.reference), row.reference) for row in found)


def fit_files(
    config: RunConfig, rows: Rows, tokenizer: PolicyTokenizer, read: Reader, tell: Tell
) -> tuple[Reader, list[str]]:
    """Drop the rows of prompt files that are too long; return a reader of the other rows, and notes for the user.

    Raises:
        ConfigError: a prompt is too long, or the policy cannot generate any of the reference answers in a file.
    """
    notes, kept = list[str](), dict[FileBase, bytes]()
    for source, found in rows.items():
        if dropped := _find_too_long(config, source, found, tokenizer, tell):
            kept[source] = _drop_lines(source, read(source), dropped)
            what = f"{len(dropped)} of {len(found)} {source.unit}s are too long, and are dropped"
            notes.append(f"{source.key} = {source.path!r}: {what}")
        if isinstance(config.environment, SingleTurnEnvironment):
            notes += _note_unreachable(config, source, [row for row in found if row.line not in dropped], tokenizer)
    return functools.cache(lambda source: kept[source] if source in kept else read(source)), notes


def describe_files(prompts: RunPrompts) -> list[str]:
    """Describe for each prompt file how many rows are trained on, held out and left out."""
    return [source.describe_rows() for source in prompts.sources if isinstance(source, JsonlSource)]


def probe_sources(config: RunConfig, prompts: RunPrompts, tokenizer: PolicyTokenizer) -> list[str]:
    """Check the first questions of prompt sources that generate questions; return notes for the user.

    Raises:
        ConfigError: responses to a question cannot be scored, or the question is too long and `prompts.too_long` is
        "refuse".
    """
    notes = list[str]()
    for which, source in enumerate(config.prompts):
        if isinstance(source, FileBase):
            continue
        asked = [*prompts.sources[which].held_out(PROBED), *map(prompts.sources[which].training, range(PROBED))]
        with ReferenceChecker() as checker:
            fault = _Judgeable(config, source, checker)
            for question in asked:
                if wrong := fault(question.reference):
                    raise ConfigError(f"prompts.{which}: question {shorten_value(question.text)}: {wrong}")
        try_pytest_cases(config, ((source.scorer_of(question.reference), question.reference) for question in asked))
        room = _compute_room(config, tokenizer)
        lengths = [
            len(tokenizer.encode_prompt(apply_template(source, question.asked), source.chat, source.system))
            for question in asked
        ]
        if long := [length for length in lengths if not 0 < length <= room]:
            what = (
                f"{len(long)} of the first {len(asked)} prompts are too long (for example "
                f"{_format_tokens(max(long), room)})"
            )
            if source.too_long == "refuse":
                raise ConfigError(f"prompts.{which}: {what}; {CURE}")
            notes.append(f"prompts.{which}: {what}; other prompts replace them")
    return notes


# matches a config key of a scorer in an error message about a row
OWN_KEY = re.compile(r"\breward\.(kind|answer|adaptive\.reference_column|sandbox\.kind)(?= = )")


@dataclass(frozen=True, slots=True)
class _Judgeable:
    """A callable that returns why no response can match a reference answer, or None if a response can match it."""

    config: RunConfig
    source: PromptBase
    checker: ReferenceChecker

    def __call__(self, reference: Mapping[str, Any]) -> str | None:
        if wrong := self._find_name_fault(reference):
            return wrong
        if self._find_environment(reference).has_reward:
            return None
        reward, section = _find_reward(self.config, self.source, reference), self._name_section(reference)
        parts = split_scorer(section, reward).items()
        return next((fault for place, part in parts if (fault := self.find(part, place, reference))), None)

    def _name_section(self, reference: Mapping[str, Any]) -> str:
        return name_section(self.source.scorer_of(reference))

    def find(self, reward: RewardConfig, section: str, reference: Mapping[str, Any]) -> str | None:
        """Return why no response can match this reference answer under this scorer, or None if a response can."""
        fault = self._find_fault(reward, reference)
        return fault and OWN_KEY.sub(rf"{section}.\1", fault)

    def _find_fault(self, reward: RewardConfig, reference: Mapping[str, Any]) -> str | None:
        if isinstance(reward, ExactReward):
            return _find_exact_fault(reference, reward.answer)
        if "answer" not in reference and (isinstance(reward, ReasoningGymReward) or self.config.policy.cold_start):
            return _describe_no_answer(reference)
        if isinstance(reward, ReasoningGymReward):
            return _find_family_fault(str(reference.get("family")))
        return self.checker.find(reward, reference)

    def _find_name_fault(self, reference: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the name of an environment or of a scorer in a prompt's row, or None if the names
        are right."""
        environment = self.config.environment
        if isinstance(environment, MixedEnvironment):
            name = reference.get(environment.column, environment.default)
            if name not in environment.kinds:
                return explain_name(environment.column, name, environment.kinds)
        column = self.source.reward_column if isinstance(self.source, FileBase) else None
        name = reference.get(column) if column else None
        if not name or (isinstance(name, str) and name in self.config.rewards):
            return None
        shown = f"{column} names a scorer ({shorten_value(name)})"
        return f"{shown} that does not exist; {self.config.explain_missing(str(name))}"

    def _find_environment(self, reference: Mapping[str, Any]) -> EnvironmentConfig:
        """Return the config of the environment that plays a prompt whose row names no missing environment."""
        environment = self.config.environment
        if not isinstance(environment, MixedEnvironment):
            return environment
        return environment.kinds[reference.get(environment.column, environment.default)]


def _describe_no_answer(reference: Mapping[str, Any]) -> str:
    others = ", ".join(repr(name) for name in reference if name not in ("family", "question"))
    cure = 'write one into its row or its reference, or name its column in prompts.columns = {answer = "..."}'
    return f"it has no answer{f', only {others}' if others else ''}; {cure}"


def _find_exact_fault(reference: Mapping[str, Any], where: str) -> str | None:
    if "answer" not in reference:
        return _describe_no_answer(reference)
    answer = reference["answer"]
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        return (
            f'the answer is of type {type(answer).__name__} ({answer!r}), but reward.kind = "exact" compares '
            "text; give text"
        )
    said = str(answer).strip()
    if not said:
        return 'the answer is empty, and reward.kind = "exact" gives no response a reward for it; give an answer'
    response = f"<answer>{said}</answer>" if where == "tag" else said
    if score_response(_build_exact(), where, response, reference).value != 1.0:
        return (
            f"the answer contains a tag ({shorten_value(said)}), so nothing in a tag can equal it; set "
            'reward.answer = "all"'
        )
    return None


@functools.cache
def _build_exact() -> Verifier:
    return build_verifier(ExactReward())


@functools.cache
def _find_family_fault(family: str) -> str | None:
    from rollflow.tasks.scorers.reasoning_gym import has_scorer

    if has_scorer(family):
        return None
    cure = 'give the reference a reasoning-gym family as "family", or set reward.kind = "exact"'
    return f'the question\'s family {family} has no scorer for reward.kind = "reasoning-gym"; {cure}'


def _check_worked(source: FileBase, rows: Sequence[PromptRow], kind: str) -> None:
    """Reject a file whose references are worked solutions, because no response equals a whole solution."""
    if source.answer_after is None and all(WORKED in row.reference["answer"] for row in rows):
        raise source.refusal(
            f"every answer contains {WORKED!r}, as worked solutions do, and "
            f'reward.kind = "{kind}" would compare the whole solution; set prompts.answer_after = "{WORKED}" '
            "to compare only what follows"
        )


def _find_too_long(
    config: RunConfig, source: FileBase, rows: Sequence[PromptRow], tokenizer: PolicyTokenizer, tell: Tell
) -> set[int]:
    """Return the line numbers of a prompt file whose prompts are too long and have to be dropped."""
    room, empty, long = _compute_room(config, tokenizer), list[tuple[int, str]](), list[tuple[int, str]]()
    last_told, count = time.monotonic(), _count_tokens(source, tokenizer)
    for number, row in enumerate(rows, 1):
        length = count(row)
        if not length:
            empty.append((row.line, "the question has no tokens for this policy; write a question"))
        elif length > room:
            long.append((row.line, f"the prompt is too long ({_format_tokens(length, room)}); {CURE}"))
        if time.monotonic() - last_told > TELL_SECONDS:
            last_told = time.monotonic()
            tell(f"{source.key} = {source.path!r}: {number:,} of {len(rows):,} prompts have been read")
    if empty:
        raise refuse_lines(source, empty)
    if long and (source.too_long == "refuse" or len(long) == len(rows)):
        raise refuse_lines(source, long)
    return {line for line, _ in long}


def _count_tokens(source: FileBase, tokenizer: PolicyTokenizer) -> Callable[[PromptRow], int]:
    """Return a function that counts the tokens of a row's prompt; an error message of the function names the row.

    The returned function also checks that the chat template writes the first system message of a row into the
    prompt.
    """
    checked = False

    def count(row: PromptRow) -> int:
        nonlocal checked
        try:
            if not checked and not isinstance(row.question, str) and row.question[0]["role"] == "system":
                checked = True
                tokenizer.template.check(row.question[0]["content"])
            return len(tokenizer.encode_prompt(apply_template(source, row.question), source.chat, source.system))
        except ConfigError as error:
            raise source.refusal(f"{source.unit} {row.line}: {error}") from None

    return count


def _drop_lines(source: FileBase, content: bytes, dropped: set[int]) -> bytes:
    lines = [line for number, line in numbered_lines(source, content) if number not in dropped]
    return "".join(f"{line}\n" for line in lines).encode()


def _note_unreachable(
    config: RunConfig, source: FileBase, rows: Sequence[PromptRow], tokenizer: PolicyTokenizer
) -> list[str]:
    """Describe the reference answers that no response can equal, because of their length or vocabulary."""
    most, lost, compared = config.engine.max_new_tokens, list[PromptRow](), 0
    for row in rows:
        reward = _find_reward(config, source, row.reference)
        if not isinstance(reward, ExactReward):
            continue
        compared += 1
        said = str(row.reference["answer"]).strip()
        tokens = tokenizer.encode_response(f"<answer>{said}</answer>" if reward.answer == "tag" else said)
        if len(tokens) > most or answer_of(tokenizer.decode_response(tokens), reward.answer) != said:
            lost.append(row)
    if not lost:
        return []
    what = f"no response of at most engine.max_new_tokens = {most} tokens can equal {len(lost)} of {compared} answers"
    first = f"{source.unit} {lost[0].line}: {shorten_value(lost[0].reference['answer'])}"
    cure = "shorten the answers, raise engine.max_new_tokens, or choose a policy that can write them"
    if len(lost) == compared:
        raise source.refusal(f"{what} ({first}); {cure}")
    return [f"{source.key} = {source.path!r}: {what} ({first})"]


def _compute_room(config: RunConfig, tokenizer: PolicyTokenizer) -> int:
    """Return the largest number of tokens that a prompt may have if room for the response is left."""
    return config.engine.limit_context(tokenizer.context) - config.engine.max_new_tokens


def _format_tokens(length: int, room: int) -> str:
    return f"{length} tokens, and the context leaves room for {room}"
