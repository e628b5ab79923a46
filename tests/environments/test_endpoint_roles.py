"""Tests of environment roles that a model behind an endpoint plays: its requests, and the effects of failures."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.environments import build_environment, endpoints
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.base_config import EndpointRole
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.environments.endpoints import EndpointRoles
from rollflow.tasks.scorers.base import Score, Unjudged
from rollflow.testing.environments import ScriptedEpisode, build_ports
from tests.support.judge_server import Body, JudgeServer, Reply, chat, judge_server


class Interview(Environment):
    """A model plays the user, who asks twice; the length of the last answer is the score."""

    async def play(self, episode: Episode) -> Score | None:
        heard = list[dict[str, str]]()
        made = None
        for number in range(2):
            said = await episode.ports.endpoints.ask("user", heard, seed=episode.seed + number)
            tokens = episode.ports.tokenizer.encode_response(said)
            if len(tokens) >= episode.room:
                break
            episode.add(tokens)
            if (made := await episode.generate(max_tokens=3)) is None:
                return None
            answer = episode.ports.tokenizer.decode_response(made.tokens)
            heard += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]
        return Score(float(len(made.tokens)) if made else 0.0)


def ask_back(number: int, body: Body) -> Reply:
    return chat(f"<{len(body['messages'])}>")


def play(server: JudgeServer, **keys: Any) -> tuple[Score | None, ScriptedEpisode]:
    config = ImportEnvironment(
        path=f"{__name__}:Interview",
        endpoints={"user": EndpointRole(url=server.url, model="simulated", tries=2, **keys)},
    )
    ports = replace(build_ports(config), endpoints=EndpointRoles(config.endpoint_roles))
    episode = ScriptedEpisode(ports, longest=1000, seed=7)
    return asyncio.run(build_environment(config).play(episode)), episode  # type: ignore[arg-type, return-value]


def test_endpoint_plays_the_user_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "sesame")
    monkeypatch.setenv("OPENAI_ORG_ID", "someone")
    with judge_server(ask_back) as server:
        score, episode = play(server, token_env="USER_KEY", temperature=0.5, extra_body={"top_k": 3})
    assert score == Score(3.0)
    assert "".join(map(chr, episode.response)) == "<0><b:<2><b:"
    first, second = server.bodies
    assert (first["messages"], first["seed"], first["temperature"], first["top_k"]) == ([], 7, 0.5, 3)
    assert (first["model"], first["max_completion_tokens"]) == ("simulated", 512)
    roles = [(message["role"], message["content"]) for message in second["messages"]]
    assert (roles, second["seed"]) == ([("assistant", "<0>"), ("user", "<b:")], 8)
    assert server.headers[0]["authorization"] == "Bearer sesame"
    assert "openai-organization" not in server.headers[0]


NESTED = Reply("[" * 200_000, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    "reply",
    [
        *(Reply("busy", 500), Reply(does="resets"), Reply("{}"), Reply("no JSON"), NESTED),
        replace(chat("\ud800"), headers={"Content-Type": "application/json"}),
    ],
)
def test_episode_of_an_unreachable_endpoint_is_unjudged(reply: Reply) -> None:
    with judge_server(lambda number, body: reply) as server:
        score, episode = play(server)
    assert score is not None
    assert score.outcome is Outcome.UNJUDGED
    assert "the endpoint user" in score.reason
    assert episode.asked == []


def test_episode_fails_if_the_endpoint_rejects_its_conversation() -> None:
    """The policy may be the cause, so the episode is not discarded."""
    with judge_server(lambda n, body: ask_back(n, body) if n == 1 else Reply("too long", 400)) as server:
        score, _ = play(server)
    assert score is not None
    assert (score.value, score.outcome) == (0.0, Outcome.UNPARSABLE)
    assert "the endpoint user refused a call with status 400: too long" in score.reason


@pytest.mark.parametrize(("status", "key"), [(401, "token_env"), (404, "model")])
def test_endpoint_that_rejects_key_or_model_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, status: int, key: str
) -> None:
    monkeypatch.setenv("USER_KEY", "sesame")
    sentence = rf"environment.endpoints.user.{key} = .*status {status}"
    with (
        judge_server(lambda n, body: Reply("sesame is wrong", status)) as server,
        pytest.raises(ConfigError, match=sentence) as failed,
    ):
        play(server, token_env="USER_KEY")
    assert "sesame" not in str(failed.value)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_rejection_after_an_answer_does_not_end_the_run(status: int) -> None:
    """A filter may reject a conversation with these statuses, so a response of the policy could end the run."""
    with judge_server(lambda n, body: ask_back(n, body) if n == 1 else Reply("no", status)) as server:
        score, _ = play(server)
    assert score is not None
    assert score.outcome is Outcome.UNJUDGED


def test_endpoint_that_never_ends_its_answer_raises_unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends a byte again and again, each within `call_seconds`."""
    monkeypatch.setattr(endpoints, "LONGEST_PAUSE", 0.0)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)

    async def run() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        role = EndpointRole(url=f"http://127.0.0.1:{port}/v1", model="m", tries=1, call_seconds=0.2)
        with pytest.raises(Unjudged, match="the endpoint user answered none of 1 calls"):
            await EndpointRoles({"user": role}).ask("user", [])
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("value", [None, "", "with\nbreak", "ключ"])
def test_missing_or_invalid_endpoint_key_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("USER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("USER_KEY", value)
    with judge_server(ask_back) as server, pytest.raises(ConfigError, match="does not hold an API key") as failed:
        play(server, token_env="USER_KEY")
    assert not value or value not in str(failed.value)


def test_call_of_an_unknown_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="the environment asks the endpoint 'user', which is not configured"):
        asyncio.run(EndpointRoles().ask("user", []))


@pytest.mark.parametrize("url", ["ftp://a", "http://me:secret@there/v1", "http://there/v1?key=secret"])
def test_endpoint_address_with_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="without a user, a password or a query") as failed:
        EndpointRole(url=url, model="m")
    assert "secret" not in failed.value.errors()[0]["msg"]
