"""Asks language models behind OpenAI-compatible endpoints for messages. Such a model plays a role that the policy does
not play, for example a user.

The client retries a call after a lost connection, a time-out, or HTTP status 408, 409, 429 or 5xx. If no try gives a
valid answer, the episode is unjudged (gets no score). If the endpoint rejects a conversation, for example as too long,
the policy may be the cause, so the episode fails. If the endpoint rejects the key or the model before its first answer,
the run ends; later the same HTTP statuses may come from a filter or a restart, so the episode is unjudged. No error
message contains the endpoint's API key.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.base_config import EndpointRole
from rollflow.tasks.scorers.base import Unjudged

REFUSED = (401, 403, 404)  # HTTP statuses that mean a wrong API key, address or model
REFUSED_CONTENT = (
    400,
    413,
    422,
)  # HTTP statuses that may mean a conversation that is too long or that a filter rejects
LONGEST_PAUSE = 60.0  # longest pause in seconds before the client repeats a call
LONGEST_QUOTE = 200  # largest number of characters of an endpoint's answer in an error message


class ConversationRefused(Exception):
    """Raised if the endpoint rejects a conversation; the policy may be the cause."""


class EndpointRoles:
    """The endpoints of an environment by name. See the module's docstring."""

    def __init__(self, roles: Mapping[str, EndpointRole] | None = None) -> None:
        self._roles = roles or {}
        self._answered = set[str]()  # names of the endpoints that have answered a call
        # a client, and the semaphore that limits its calls, belong to one event loop
        self._open: WeakKeyDictionary[Any, dict[str, tuple[Any, asyncio.Semaphore]]] = WeakKeyDictionary()

    async def ask(self, name: str, messages: Sequence[Mapping[str, str]], seed: int = 0) -> str:
        """Return the next message of the model that plays the role `name`, given the conversation so far.

        Raises:
            Unjudged: the endpoint does not answer.
            ConversationRefused: the endpoint rejects the conversation.
            ConfigError: there is no such endpoint, or it rejects the key or the model.
        """
        if (role := self._roles.get(name)) is None:
            known = ", ".join(self._roles) or "none"
            raise ConfigError(
                f"environment.endpoints: the environment asks the endpoint {name!r}, which is not configured; the "
                f"endpoints are {known}"
            )
        client, places = await self._find_client(name, role)
        async with places:
            return await self._call(name, role, client, messages, seed)

    async def _find_client(self, name: str, role: EndpointRole) -> tuple[Any, asyncio.Semaphore]:
        """Return the client of the running event loop and the semaphore that limits its calls; create both if there are
        none.
        """
        clients = self._open.setdefault(asyncio.get_running_loop(), {})
        if name not in clients:
            try:
                openai = await asyncio.to_thread(_import_openai)
            except ImportError as error:
                cure = f"the package {error.name} is missing; pip install 'rollflow[judge]'"
                raise ConfigError(f"environment.endpoints.{name}: {cure}") from None
            # By default the client sends the values of OPENAI_ORG_ID and OPENAI_PROJECT_ID to any endpoint.
            own = {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
            client = openai.AsyncOpenAI(
                base_url=role.url,
                api_key=_read_key(name, role) or "none",
                timeout=role.call_seconds,
                max_retries=role.tries - 1,
                default_headers=own,
            )
            clients.setdefault(name, (client, asyncio.Semaphore(role.at_once)))
        return clients[name]

    async def _call(
        self, name: str, role: EndpointRole, client: Any, messages: Sequence[Mapping[str, str]], seed: int
    ) -> str:
        import openai

        try:
            # The client's own time limit starts again with every byte of an answer.
            async with asyncio.timeout(role.tries * (role.call_seconds + LONGEST_PAUSE)):
                answer = await client.chat.completions.create(
                    model=role.model,
                    messages=[dict(message) for message in messages],
                    temperature=role.temperature,
                    seed=seed,
                    max_completion_tokens=role.max_tokens,
                    extra_body=role.extra_body,
                )
            said = str(answer.choices[0].message.content or "")
            said.encode()  # raises an error for half a surrogate pair, which no tokenizer accepts
        except openai.APIStatusError as error:
            ends_run = name not in self._answered
            raise _explain(name, role, error.status_code, error.response.text, ends_run=ends_run) from None
        except (openai.APIError, LookupError, AttributeError, TypeError, ValueError, RecursionError, TimeoutError) as e:
            raise Unjudged(
                f"the endpoint {name} answered none of {role.tries} calls; the last one failed with {type(e).__name__}"
            ) from None
        self._answered.add(name)
        return said


def _explain(name: str, role: EndpointRole, status: int, text: str, *, ends_run: bool) -> Exception:
    """Return the error for a call that the endpoint rejected. `ends_run` is true if a rejected key or model ends the
    run.
    """
    key = _read_key(name, role)
    said = " ".join((text.replace(key, "***") if key else text).split())[:LONGEST_QUOTE]
    if status in REFUSED and ends_run:
        which = "model" if status == 404 else "token_env"
        cure = "correct the key, the address or the model"
        where = f"environment.endpoints.{name}.{which} = {getattr(role, which)!r}"
        return ConfigError(f"{where}: {role.url} refuses this value with status {status}: {said}; {cure}")
    what = f"the endpoint {name} refused a call with status {status}: {said}"
    return ConversationRefused(what) if status in REFUSED_CONTENT else Unjudged(what)


def _read_key(name: str, role: EndpointRole) -> str:
    """Return the API key from an environment variable; "" if the endpoint needs none."""
    if not role.token_env:
        return ""
    key = os.environ.get(role.token_env, "")
    if not key or not (key.isascii() and key.isprintable() and key == key.strip()):
        where = f"environment.endpoints.{name}.token_env = {role.token_env!r}"
        raise ConfigError(f"{where}: this variable does not hold an API key; set it to the key alone")
    return key


def _import_openai() -> Any:
    import openai

    return openai


NO_ENDPOINTS = EndpointRoles()
