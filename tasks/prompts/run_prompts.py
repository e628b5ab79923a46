"""Builds the prompts of a run from the questions of all its sources. The prompt at an index depends only on the run's
config and seed, and can be requested at any time.

A training prompt that is too long for the policy's context is replaced by a later prompt of its source. A held-out
prompt that is too long is left out.

No training prompt and no demonstration has the same question key as a held-out prompt.

With D question sources, the index of a prompt is position * D + source.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt
from rollflow.tasks.prompts import build_source
from rollflow.tasks.prompts.base import Encoder, Question, Reader
from rollflow.tasks.prompts.config import ColumnSumsPrompts, FilePrompts, PromptConfig
from rollflow.tasks.prompts.held_out import HeldOut, Split
from rollflow.tasks.prompts.jsonl import JsonlSource
from rollflow.tasks.prompts.messages import apply_template, list_messages
from rollflow.tasks.prompts.section import PLACE

if TYPE_CHECKING:
    from rollflow.tasks.prompts.epochs import Epochs

log = logging.getLogger(__name__)
# number of later positions that are tried after a prompt that is too long, and the distance between them
TRIES, LEAP = 64, 100_003
SAMPLED = 16  # number of training questions that the hash of a question source covers


class RunPrompts:
    """The prompts of a run, with the guarantees of the module's docstring."""

    def __init__(
        self,
        configs: Sequence[PromptConfig],
        seed: int,
        held_out: int,
        encode: Encoder | None,
        longest: int,
        read: Reader,
        split: Split = "key",
    ) -> None:
        """Open the prompts of a run. Without `encode`, prompts have texts but no tokens.

        Args:
            longest: the largest number of tokens of a prompt.
            read: a function that returns the content of a question source's prompt file.
            split: the attribute by which questions are compared with held-out questions.

        Attributes:
            epochs: the epochs in the run's log; None before the run is created.
        """
        self.configs, self.split = configs, split
        share = -(-held_out // len(configs))
        self._excluded = _held_out_sets(configs, split)
        self.sources = [
            build_source(config, seed, share, read, held) for config, held in zip(configs, self._excluded, strict=True)
        ]
        self.epochs: Epochs | None = None
        self._held_out = held_out
        self._encode = encode
        self._longest = longest
        self._assigned: list[tuple[int, int]] = []  # demonstration -> (source, position in the source)
        self._counts = [0] * len(configs)
        self._replaced: set[int] = set()  # question sources for which a warning about a replaced prompt was logged
        self._credit = [0.0] * len(configs)
        self._shares = sum(c.share for c in configs)
        # thread for slow sources; a single thread finds prompts in the order of the requests
        self._thread = ThreadPoolExecutor(1) if any(config.is_slow for config in configs) else None

    def prompt(self, index: int) -> Prompt:
        """Return the training prompt at `index`."""
        return self.find(index)[0]

    def request(self, index: int) -> Prompt | Awaitable[Prompt]:
        """Return the training prompt at `index`, or an awaitable for a slow question source. A thread finds the prompt
        of a slow source, so that the event loop is not blocked.
        """
        if self._thread is None:
            return self.prompt(index)
        return asyncio.get_running_loop().run_in_executor(self._thread, self.prompt, index)

    def find(self, index: int) -> tuple[Prompt, Question]:
        """Return the training prompt at `index`, with its question."""
        position, which = divmod(index, len(self.sources))
        place = self._locate(which, position)
        return self._first_fit(which, f"{index:08d}", index, self.sources[which].training, place)

    def question(self, index: int) -> Question:
        """Return the training question at `index`, even if its prompt would be too long."""
        position, which = divmod(index, len(self.sources))
        return self.sources[which].training(self._locate(which, position))

    def _locate(self, which: int, position: int) -> int:
        """Return the position that a prompt would have in its source if no questions were skipped."""
        return self.epochs.locate(which, position) if self.epochs else position

    def is_held_out(self, which: int, question: Question) -> bool:
        """Return whether the question is held out, so that source number `which` must not train on it."""
        return question in self._excluded[which]

    def demonstration(self, index: int) -> tuple[Prompt, str]:
        """Return a cold-start demonstration: a prompt and the right answer."""
        return self.demonstrate(*self._assign_place(index))

    def demonstrate(self, which: int, position: int) -> tuple[Prompt, str]:
        """Return the demonstration at `position` of question source number `which`: a prompt and the right answer."""
        prompt, question = self.find_demonstration(which, position)
        return prompt, question.answer

    def find_demonstration(self, which: int, position: int) -> tuple[Prompt, Question]:
        """Return the prompt at `position` of the demonstrations of question source number `which`, and its question."""
        name = f"demo-{position:08d}"
        return self._first_fit(which, name, position, self.sources[which].demonstration, position)

    def held_out(self) -> list[Prompt]:
        """Return the held-out prompts, which are the same in all evaluations of the run."""
        prompts = list[Prompt]()
        for which, question in self._list_held():
            prompt = self._build_prompt(which, f"held-{len(prompts):06d}", len(prompts), question)
            if self._fits(prompt):
                prompts.append(prompt)
            elif self.configs[which].too_long == "refuse":
                raise self._build_too_long_error(which, prompt)
        if not prompts:
            raise self._build_no_held_out_error()
        return prompts

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        """Return the prompts of each evaluation set, whose name is their domain in metrics.

        The indices of prompts in evaluation sets follow those of the held-out prompts. A prompt that is too long is
        left out or raises an error, as `too_long` says.
        """
        found: dict[str, list[Prompt]] = {}
        index = self._held_out
        for which, (config, source) in enumerate(zip(self.configs, self.sources, strict=True)):
            sets = config.evaluation_sets if isinstance(config, FilePrompts) else {}
            for name, one in sets.items():
                assert isinstance(source, JsonlSource)
                asked = enumerate(source.evaluation_set(name, one.prompts), index)
                prompts = [self._build_prompt(which, "", place, question) for place, question in asked]
                prompts = [replace(prompt, id=f"{name}/{prompt.index}", domain=name) for prompt in prompts]
                index += len(prompts)
                if config.too_long == "refuse" and (long := [one for one in prompts if not self._fits(one)]):
                    raise self._build_too_long_error(which, long[0])
                found[name] = [prompt for prompt in prompts if self._fits(prompt)]
        return found

    def count_held_out(self) -> int:
        """Count the held-out questions of the run; raise `ConfigError` if there are none."""
        return len(self._list_held())

    def held_out_questions(self) -> list[Question]:
        """List the questions of the held-out prompts."""
        return [question for _, question in self._list_held()]

    def _list_held(self) -> list[tuple[int, Question]]:
        share = -(-self._held_out // len(self.sources))
        found = [(which, q) for which, source in enumerate(self.sources) for q in source.held_out(share)]
        if not found:
            raise self._build_no_held_out_error()
        return found[: self._held_out]

    def _build_no_held_out_error(self) -> ConfigError:
        return ConfigError(
            f"evaluation.prompts = {self._held_out}: no prompt is held out, so there is nothing to evaluate with; "
            "raise prompts.held_out or give more lines"
        )

    def sha256(self, which: int) -> str:
        """Return a hash of the held-out questions and the first `SAMPLED` training questions of a source, with their
        answers.
        """
        source, share = self.sources[which], -(-self._held_out // len(self.sources))
        asked = [*source.held_out(share), *(source.training(position) for position in range(SAMPLED))]
        return hashlib.sha256(json.dumps([(q.text, q.answer) for q in asked]).encode()).hexdigest()

    def texts(self, count: int) -> list[str]:
        """Return the texts of `count` demonstrations, from which the vocabulary of a tokenizer is built."""
        places = [self._assign_place(index) for index in range(count)]
        found = list[str]()
        for which, position in places:
            question, config = self.sources[which].demonstration(position), self.configs[which]
            text = question.text if config.template is None else config.template.replace(PLACE, question.text)
            found += [text, question.answer, *_list_turns(question)]
        return found

    def _assign_place(self, index: int) -> tuple[int, int]:
        """Assign a demonstration to the question source that is furthest below its share, by smooth weighted
        round-robin.
        """
        total = self._shares
        while len(self._assigned) <= index:
            for which, config in enumerate(self.configs):
                self._credit[which] += config.share / total
            which = max(range(len(self._credit)), key=self._credit.__getitem__)
            self._credit[which] -= 1.0
            self._assigned.append((which, self._counts[which]))
            self._counts[which] += 1
        return self._assigned[index]

    def _build_prompt(self, which: int, name: str, index: int, question: Question) -> Prompt:
        config, domain = self.configs[which], self.configs[which].domain
        assert self._encode is not None, "the prompts were opened without an encoder"
        asked = apply_template(config, question.asked)
        read = ModelInput.of(self._encode(asked, config.chat, config.system))
        scorer, messages = config.scorer_of(question.reference), list_messages(asked, config.system)
        return Prompt(f"{domain}/{name}", index, domain, question.text, read, question.reference, scorer, messages)

    def _first_fit(
        self, which: int, name: str, index: int, ask: Callable[[int], Question], position: int
    ) -> tuple[Prompt, Question]:
        """Return the prompt at `position` of a question source; if it is too long, return the prompt at a later
        position.

        All processes of a run try the same later positions, so they find the same prompt.
        """
        for place in range(position, position + TRIES * LEAP, LEAP):
            question = ask(place)
            prompt = self._build_prompt(which, name, index, question)
            if self._fits(prompt):
                return prompt, question
            self._warn_replaced(which)
        raise self._build_too_long_error(which, prompt)

    def _warn_replaced(self, which: int) -> None:
        """Warn, once for each question source, that a prompt was too long and was replaced."""
        if which not in self._replaced:
            self._replaced.add(which)
            log.warning("prompts.%d: a prompt is too long for the policy's context; another prompt replaces it", which)

    def _fits(self, prompt: Prompt) -> bool:
        return 0 < prompt.input.length <= self._longest

    def _build_too_long_error(self, which: int, prompt: Prompt) -> ConfigError:
        return ConfigError(
            f"prompts.{which}: a prompt has {prompt.input.length} tokens, and the context leaves room for "
            f"only {self._longest}; lower engine.max_new_tokens, choose a policy with a larger context, or "
            "choose shorter prompts"
        )


def _list_turns(question: Question) -> list[str]:
    """List the texts of a demonstrated episode: those of the policy and those of the environment."""
    return [text for turn in question.turns for text in (turn.said, *(reply["content"] for reply in turn.replies))]


def _held_out_sets(configs: Sequence[PromptConfig], split: Split) -> list[HeldOut]:
    """Return the set of held-out questions for each source; with the split "key", all sources share one set.

    Sources of column sums compare keys even with the split "text".
    """
    if split == "key":
        return [HeldOut()] * len(configs)
    return [HeldOut("key" if isinstance(config, ColumnSumsPrompts) else "text") for config in configs]
