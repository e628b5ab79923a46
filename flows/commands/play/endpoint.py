"""Plays with a model behind an OpenAI-compatible endpoint, which gets the whole conversation as chat messages in each
turn. This module cuts an answer at the first stop string, because an endpoint would remove the string without reporting
it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rollflow.flows.commands.play.players import generate_text
from rollflow.flows.commands.play.transcript import USER, Transcript
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.episode import Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration

CALL_SECONDS = 300.0  # longest time in seconds that one call of the endpoint may take
ROLES = ("system", USER, "assistant")  # every endpoint knows these roles
LONGEST_ANSWER = 200  # largest number of characters of an endpoint's answer in an error message


@dataclass
class EndpointPlayer:
    """A model behind an endpoint."""

    name: str
    url: str
    model: str
    tokenizer: PolicyTokenizer
    temperature: float
    seed: int
    token: str = ""
    is_person: bool = False

    async def answer(self, episode: int, turn: Turn, conversation: Transcript) -> VersionedGeneration:
        """Ask the model for an answer.

        Raises:
            Unreachable: the endpoint does not answer.
            ConfigError: the endpoint rejects the call.
        """
        body = {
            "model": self.model,
            "messages": [_limit_role(message) for message in conversation.messages],
            "max_completion_tokens": turn.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed + episode,
        }
        return generate_text(_read_text(await self._call(body), self.url), turn, self.tokenizer)

    async def _call(self, body: Mapping[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            async with httpx.AsyncClient(timeout=CALL_SECONDS, headers=headers) as client:
                answer = await client.post(f"{self.url.rstrip('/')}/chat/completions", json=body)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            cure = "give an address like http://127.0.0.1:8000/v1"
            raise ConfigError(f"--endpoint {self.url}: this is not the address of an endpoint; {cure}") from None
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise Unreachable(
                f"the endpoint {self.url} does not answer ({said}); start it, or correct --endpoint"
            ) from None
        if answer.status_code != httpx.codes.OK:
            said = " ".join(answer.text.split())[:LONGEST_ANSWER]
            cure = "correct --endpoint, --model or --token-env"
            raise ConfigError(
                f"--endpoint {self.url}: the endpoint answers with status {answer.status_code} ({said}); {cure}"
            )
        return answer


def read_token(name: str | None) -> str:
    """Return the API key in the environment variable `name`; "" without a name.

    Raises:
        ConfigError: the variable is not set, or an HTTP header cannot hold its value. No error message contains the API
            key.
    """
    if not name:
        return ""
    token = os.environ.get(name, "")
    if not token or not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ConfigError(f"--token-env {name}: this variable does not hold an API key; set it to the key alone")
    return token


def _limit_role(message: Mapping[str, str]) -> dict[str, str]:
    role = message["role"] if message["role"] in ROLES else USER
    return {"role": role, "content": message["content"]}


def _read_text(answer: httpx.Response, url: str) -> str:
    """Return the text of the model's message."""
    try:
        text = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise Unreachable(f"the endpoint {url} answered without a message; is it an OpenAI-compatible endpoint?")
    return text
