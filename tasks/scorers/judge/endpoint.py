"""Calls a judge at an OpenAI-compatible endpoint, with limits on simultaneous calls and on tokens per minute.

A call is repeated after a lost connection, a time-out, HTTP status 408, 409, 429 or 5xx, or an invalid verdict.

A question without a verdict raises `Unjudged`, or `NoVerdict` if the response may be the cause, for example because it
is too long.

A question is *overtaken* if its call misses the time limit while a call that began later gets a verdict. The error
`LateVerdict` is raised for a question that was overtaken `judge_tries` times.

The run ends if the endpoint rejects the API key or the model before the first verdict, or if the token budget is used
up.

No error message contains the API key.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rollflow.storage.errors import ConfigError, RollflowError
from rollflow.storage.records import Outcome
from rollflow.storage.run_records.judge_usage import JudgeUsage
from rollflow.tasks.scorers.base import Unjudged
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.judge.prompts import JudgeQuestion, Verdict

REFUSED = (401, 403, 404)  # HTTP statuses that mean a wrong API key, address or model, so that a retry is useless
CHARS_PER_TOKEN = 3  # characters per token in the estimate of a request's tokens; few texts have fewer
# HTTP statuses that may mean that a response is too long, or that a filter rejects it
REFUSED_CONTENT = (400, 413, 422)
LATE = (408, 504)  # HTTP statuses for a judge that took too long
MOST_OVERTAKEN = 10_000  # largest number of overtaken questions that are remembered
LONGEST_ANSWER = 200  # largest number of characters of an endpoint's answer in an error message


class NoVerdict(RollflowError):
    """Raised if the judge gave no verdict, and the response may be the cause."""

    outcome = Outcome.UNPARSABLE


class LateVerdict(NoVerdict):
    """Raised if the judge repeatedly gave no verdict in time, while it gave verdicts on questions that were asked
    later.
    """

    outcome = Outcome.TIMEOUT


class LateAnswer(Unjudged):
    """Raised if the judge answered a call too late, or not at all."""


class Endpoint:
    """Sends questions to a judge."""

    def __init__(self, config: JudgeReward, section: str, used: JudgeUsage | None = None) -> None:
        """Store the config; the tokens of calls are added to `used`."""
        self._config, self._section = config, section
        self._has_verdict = False
        self._places = asyncio.Semaphore(config.at_once)
        self._limiter: Any = None
        self._client: Any = None
        self._key = ""
        self._error: ConfigError | None = None
        self._order = itertools.count()  # numbers the calls in the order in which they began
        self._newest_answered = -1  # number of the newest call that gave a verdict
        self._overtaken: OrderedDict[str, int] = OrderedDict()  # question -> how often it was overtaken
        self.failed = asyncio.Event()
        self.usage = used or JudgeUsage()

    async def open(self) -> None:
        """Create the HTTP client, without making a call.

        Raises:
            ConfigError: the environment variable with the API key is not set or holds no valid key, or a package is
            missing.
        """
        if name := self._config.token_env:
            self._key = self._read_key(name)
        try:
            openai, aiolimiter = await asyncio.to_thread(_import_packages)
        except ImportError as error:
            cure = f"the package {error.name} is missing; pip install 'rollflow[judge]'"
            raise ConfigError(f"{self._section}.kind = 'judge': {cure}") from None
        # By default the client would send OPENAI_ORG_ID and OPENAI_PROJECT_ID to any endpoint.
        own = {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
        self._client = openai.AsyncOpenAI(
            base_url=self._config.url,
            api_key=self._key or "none",
            timeout=self._config.call_seconds,
            default_headers=own,
        )
        if limit := self._config.tokens_per_minute:
            self._limiter = aiolimiter.AsyncLimiter(limit, 60.0)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
        self._client = None

    @property
    def error(self) -> ConfigError:
        """The error with which the endpoint failed; the event `failed` must be set."""
        assert self._error is not None
        return self._error

    def _read_key(self, name: str) -> str:
        """Return the API key from an environment variable."""
        where = f"{self._section}.token_env = {name!r}"
        if not (key := os.environ.get(name)):
            raise ConfigError(f"{where}: this environment variable is not set; set it to the API key")
        # The HTTP client's error about an invalid header would quote the key.
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            cure = "set it to the key alone, in ASCII and without a line break or white space at its ends"
            raise ConfigError(
                f"{where}: the value of this environment variable cannot be sent in an HTTP header; {cure}"
            )
        return key

    async def ask(self, question: JudgeQuestion, repeat: int) -> Verdict:
        """Return the judge's verdict on a question; the number `repeat` changes the judge's random seed.

        Raises:
            Unjudged: no try gave a valid verdict.
            NoVerdict: no try gave a valid verdict, and the response may be the cause.
            ConfigError: the endpoint has failed in a way that ends the run.
        """
        left, text = self._config.tries, f"{repeat} {question.text}"
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        while True:
            async with self._places:
                await self._reserve(self._estimate(question))
                began = next(self._order)
                try:
                    text, tries = await self._call(question, left, 1000 * repeat + self._config.tries - left)
                except LateAnswer as error:
                    raise self._note_late(key, began, str(error)) from None
            left -= tries
            has_message = False
            try:
                choice, tokens = _read_answer(text)
                has_message = True
                await self._count(question, tokens)
                verdict = question.read(_read_message(choice))
            except (ValueError, RecursionError) as error:
                if left <= 0:
                    said = f"{self._config.tries} calls gave no verdict; {self._quote(str(error))}"
                    raise self._give_up(said, may_be_response=has_message) from None
                continue
            self.usage.verdicts += 1
            self._newest_answered = max(self._newest_answered, began)
            self._overtaken.pop(key, None)
            self._has_verdict = True
            return verdict

    def _note_late(self, key: str, began: int, said: str) -> Exception:
        """Return the error for a question whose call (number `began`) was answered too late; count how often it was
        overtaken.
        """
        if self._newest_answered < began:
            return Unjudged(said)
        count = self._overtaken[key] = self._overtaken.get(key, 0) + 1
        if len(self._overtaken) > MOST_OVERTAKEN:
            self._overtaken.popitem(last=False)
        if count < self._config.judge_tries:
            return Unjudged(said)
        return LateVerdict(f"{said}; this happened {count} times while the judge gave verdicts on other responses")

    async def _call(self, question: JudgeQuestion, tries: int, seed: int) -> tuple[str, int]:
        """Call the endpoint up to `tries` times; return the body of the answer, and the number of tries."""
        import openai

        self._check_budget()
        body = self._build_body(question, seed)
        client = self._client.with_options(max_retries=tries - 1)
        try:
            async with asyncio.timeout(self._config.deadline_seconds):
                answer = await client.chat.completions.with_raw_response.create(**body)
        except TimeoutError:
            limit = f"{self._config.deadline_seconds:g} s ({self._section}.deadline_seconds)"
            raise LateAnswer(f"the judge gave no verdict within {limit}") from None
        except openai.APITimeoutError:
            limit = f"{self._config.call_seconds:g} s ({self._section}.call_seconds)"
            raise LateAnswer(f"the judge answered none of {tries} calls within {limit}") from None
        except openai.APIStatusError as error:
            raise self._explain(error.status_code, error.response.text) from None
        except openai.APIError as error:
            raise Unjudged(
                f"the judge answered none of {tries} calls; the last error: {self._quote(_find_cause(error))}"
            ) from None
        self.usage.calls += 1
        return answer.http_response.text, answer.retries_taken + 1

    def _build_body(self, question: JudgeQuestion, seed: int) -> dict[str, Any]:
        config = self._config
        schema = {"name": "verdict", "strict": True, "schema": question.schema}
        return {
            "model": config.model,
            "messages": question.messages,
            "temperature": config.temperature,
            "seed": seed,
            "max_completion_tokens": config.max_tokens,
            "response_format": {"type": "json_schema", "json_schema": schema},
            "extra_body": config.extra_body,
        }

    def _explain(self, status: int, text: str) -> Exception:
        """Return the error for a call that the endpoint refused."""
        said = f"status {status}: {self._quote(text)}"
        if status in LATE:
            return LateAnswer(f"the judge refused a call with {said}")
        if status not in REFUSED or self._has_verdict:
            return self._give_up(f"the judge refused a call with {said}", may_be_response=status in REFUSED_CONTENT)
        key = "model" if status == 404 else "token_env"
        cure = "correct the key, the address or the model"
        return self._fail(
            f"{key} = {getattr(self._config, key)!r}: {self._config.url} refuses this value with {said}; {cure}"
        )

    def _give_up(self, said: str, *, may_be_response: bool) -> Exception:
        """Return the error for a question without a verdict."""
        return NoVerdict(said) if may_be_response and self._has_verdict else Unjudged(said)

    def _check_budget(self) -> None:
        """Raise an error if the endpoint has failed or the token budget is used up."""
        budget = self._config.budget_tokens
        if budget and self.usage.tokens >= budget and self._error is None:
            raise self._fail(
                f"budget_tokens = {budget}: the judge has used {self.usage.tokens} tokens; raise the budget, and "
                "resume the run"
            )
        if self._error is not None:
            raise self._error

    def _fail(self, what: str) -> ConfigError:
        self._error = ConfigError(f"{self._section}.{what}")
        self.failed.set()
        return self._error

    async def _reserve(self, tokens: int) -> None:
        """Wait until the limit of tokens per minute allows `tokens` more tokens."""
        while self._limiter is not None and tokens > 0:
            some = min(tokens, self._config.tokens_per_minute or tokens)
            await self._limiter.acquire(some)
            tokens -= some

    async def _count(self, question: JudgeQuestion, tokens: int | None) -> None:
        """Count the tokens of an answered call; tokens above the estimate delay the next calls."""
        estimate = self._estimate(question)
        self.usage.tokens += estimate if tokens is None else tokens
        await self._reserve((tokens or 0) - estimate)

    def _estimate(self, question: JudgeQuestion) -> int:
        """Return the largest number of tokens that a call is expected to use."""
        return sum(len(one["content"]) for one in question.messages) // CHARS_PER_TOKEN + self._config.max_tokens

    def _quote(self, text: str) -> str:
        """Return the beginning of a text as one line, without the endpoint's API key."""
        hidden = text.replace(self._key, "***") if self._key else text
        return " ".join(hidden.split())[:LONGEST_ANSWER]


def _import_packages() -> tuple[Any, Any]:
    import aiolimiter
    import openai

    return openai, aiolimiter


def _read_answer(text: str) -> tuple[Mapping[str, Any], int | None]:
    """Return the judge's choice and the number of tokens in an endpoint's answer; raise `ValueError` if there is no
    message.
    """
    answer = json.loads(text)
    try:
        choice, usage = answer["choices"][0], answer.get("usage")
        choice["message"]["content"]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("the answer of the judge's endpoint has no message") from None
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return choice, total if type(total) is int and total >= 0 else None


def _read_message(choice: Mapping[str, Any]) -> str:
    """Return the text of the judge's message; raise `ValueError` if the text is missing or cut off."""
    if choice.get("finish_reason") == "length":
        raise ValueError("the judge's answer was cut off at reward.max_tokens; raise reward.max_tokens")
    content = choice["message"]["content"]
    if not isinstance(content, str):
        raise ValueError("the message in the judge's answer has no text")
    return content


def _find_cause(error: BaseException) -> str:
    """Return the text of the root cause of `error`."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
