"""Renders chats with the chat template in a policy's folder.

A chat template may read the current time (`strftime_now`). This time is fixed at the run's start, so that a question
always has the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, cast

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Asked
from rollflow.tasks.prompts.messages import list_messages

QUESTION, ANSWER = "What is the colour of snow?", "xylophone"  # test texts, which no template contains
SYSTEM = "You answer."
Tool = Mapping[str, Any]  # the JSON schema of a function that the policy may call
THOUGHT, THINKS, ENDS_THOUGHT = "White, I guess.", "<think>\n", "\n</think>\n\n"
# a duration that changes every field of a date and time
ANOTHER_TIME = timedelta(days=400, hours=1, minutes=1, seconds=1)


class ChatTemplate:
    """Renders conversations with the chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, now: float) -> None:
        """Fix the time that the chat template reads at `now`, in seconds since the Unix epoch."""
        self._tokenizer, self._moment = tokenizer, datetime.fromtimestamp(now, UTC)
        self._keeps = dict[tuple[tuple[str, ...], bool], bool]()  # results of `keeps_answer`

    def encode(self, asked: Asked, system: str | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the prompt tokens of a question, up to the position where the policy's answer begins.

        `tools` are the JSON schemas of the tools that the policy may call.

        Raises:
            ConfigError: the chat template rejects the question or the system message.
        """
        tokens = _attempt(system, lambda: self._apply(list_messages(asked, system), tokenize=True, tools=tools))
        return [int(token) for token in tokens]

    def writes_tools(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Tool]) -> bool:
        """Return whether the chat template writes the schemas of tools into the prompt."""
        with_tools, without = self.render_messages(messages, tools), self.render_messages(messages)
        names = [str(tool["function"]["name"]) for tool in tools]
        return all(with_tools.count(name) > without.count(name) for name in names)  # the question may name a tool, too

    def render(self, text: str, system: str | None) -> str:
        """Return the prompt of a question as text."""
        return cast(str, _attempt(system, lambda: self._apply(list_messages(text, system), tokenize=False)))

    def render_after_answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text that the chat template writes between two answers of the policy, if `messages` follow the
        first answer.

        Raises:
            ConfigError: the chat template rejects the messages, or does not render answers unchanged.
        """
        try:
            rendered = self._render_conversation(None, messages)
        except ConfigError:  # some chat templates require a system message
            rendered = self._render_conversation(SYSTEM, messages)
        _, found, after = rendered.partition(ANSWER)
        if not found:
            raise ConfigError(f"{_CHAT}: the policy's chat template leaves answers out of the prompt; {_NO_CHAT}")
        return after

    def render_messages(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Tool] = ()) -> str:
        """Return the text of a conversation, up to the position where the policy's next answer begins.

        Raises:
            ConfigError: the chat template rejects the messages.
        """
        return cast(str, _attempt(None, lambda: self._apply(messages, tokenize=False, tools=tools)))

    def keeps_answer(self, roles: tuple[str, ...], *, thinks: bool) -> bool:
        """Return whether the chat template leaves an answer unchanged if messages with the roles `roles` follow.

        With `thinks`, the answer contains a thought in <think> tags, which some chat templates remove from earlier
        turns.
        """
        if (roles, thinks) not in self._keeps:
            try:
                found = self._try_answer(roles, thinks, None)
            except ConfigError:  # some chat templates require a system message
                found = self._try_answer(roles, thinks, SYSTEM)
            self._keeps[roles, thinks] = found
        return self._keeps[roles, thinks]

    def _try_answer(self, roles: tuple[str, ...], thinks: bool, system: str | None) -> bool:
        asked = list_messages(QUESTION, system)
        before = self.render_messages(asked)
        answer = f"{THINKS}{THOUGHT}{ENDS_THOUGHT}{ANSWER}" if thinks else ANSWER
        if before.endswith(THINKS):  # the chat template has begun the thought
            answer = answer.removeprefix(THINKS) if thinks else f"{ENDS_THOUGHT}{ANSWER}"
        following = [{"role": role, "content": QUESTION} for role in roles]
        return self.render_messages([*asked, {"role": "assistant", "content": answer}, *following]).startswith(
            before + answer
        )

    def _render_conversation(self, system: str | None, messages: Sequence[Mapping[str, str]]) -> str:
        conversation = [*list_messages(QUESTION, system), {"role": "assistant", "content": ANSWER}, *messages]
        return cast(str, _attempt(None, lambda: self._apply(conversation, tokenize=False)))

    def check(self, system: str | None) -> None:
        """Reject a chat template that omits the system message or the question, or whose output is not deterministic.

        Raises:
            ConfigError: the chat template fails the check; the message says what the user must change.
        """
        try:
            rendered = self.render(QUESTION, system)
        except ConfigError:
            # If the template also fails without the system message, that error is raised.
            self.render(QUESTION, None)
            raise
        if QUESTION not in rendered:
            raise ConfigError(f"{_CHAT}: the policy's chat template leaves the question out of the prompt; {_NO_CHAT}")
        if system is not None and system.strip() not in rendered:
            raise ConfigError(
                f"prompts.system = {system!r}: the policy's chat template leaves the system message out of the prompt; "
                "remove prompts.system, or write its words into the questions"
            )
        if rendered != self.render(QUESTION, system):
            raise ConfigError(f"{_CHAT}: the policy's chat template gives a different prompt each time; {_NO_CHAT}")

    def reads_clock(self, system: str | None) -> bool:
        """Return whether prompts that the chat template renders depend on the current time."""
        later = ChatTemplate(self._tokenizer, (self._moment + ANOTHER_TIME).timestamp())
        return self.render(QUESTION, system) != later.render(QUESTION, system)

    def end_of_turn(self, special: Mapping[str, int]) -> int | None:
        """Return the special token that the chat template writes after an answer, or None.

        None is also returned if the chat template rejects answers.
        """
        rendered = ""
        for system in (None, SYSTEM):  # some chat templates require a system message
            conversation = [*list_messages(QUESTION, system), {"role": "assistant", "content": ANSWER}]
            with contextlib.suppress(ConfigError):
                rendered = _attempt(None, partial(self._apply, conversation, tokenize=False, generate=False))
                break
        _, found, after = rendered.rpartition(ANSWER)
        after = after.lstrip()
        names = sorted((name for name in special if name and after.startswith(name)), key=len)
        return special[names[-1]] if found and names else None

    def _apply(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        generate: bool = True,
        tools: Sequence[Tool] = (),
    ) -> Any:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            add_generation_prompt=generate,
            tokenize=tokenize,
            return_dict=False,
            strftime_now=self._moment.strftime,
        )


_CHAT, _NO_CHAT = "prompts.chat = True", "correct the template, or set prompts.chat = false"


def _attempt(system: str | None, render: Callable[[], Any]) -> Any:
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - a template is code of the folder's author
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if system is None:
        raise ConfigError(f"{_CHAT}: the policy's chat template fails ({said}); {_NO_CHAT}")
    raise ConfigError(
        f"prompts.system = {system!r}: the policy's chat template refuses a system message ({said}); "
        "remove prompts.system, or write its words into the questions"
    )
