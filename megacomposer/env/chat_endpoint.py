"""One question to a language model behind an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import httpx

from megacomposer.config import Config

_MIN_SECRET_CHARS = 8


class ChatError(RuntimeError):
    """The endpoint gave no chat completion."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; 0: no answer came, or one that is no chat completion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatEndpointConfig(Config):
    """Where a model answers."""

    url: str
    """Base address, such as "http://127.0.0.1:8000/v1"; "/chat/completions" is added."""
    model: str
    """Name of the model, as the endpoint knows it."""
    timeout_s: float = 60.0
    """Of one request."""
    attempts: int = 2
    """Requests until a question counts as failed. Our choice."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; it must start with http:// or https://")
        if self.attempts < 1 or self.timeout_s <= 0:
            raise ValueError("attempts must be >= 1, timeout_s > 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """What the model said."""

    text: str
    """"" where it said nothing, such as a refusal, or a limit that its thoughts used up."""
    finish_reason: str
    """As the endpoint spells it: "stop", "length", ...; "" where it does not say."""


class ChatEndpoint:
    """Close it after use.

    `headers` are sent with each request, such as an authorization; they appear in no message.
    """

    def __init__(
        self, config: ChatEndpointConfig, *, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._model = config.model
        self._secrets = [
            word
            for value in (headers or {}).values()
            for word in value.split()
            if len(word) >= _MIN_SECRET_CHARS
        ]
        self._client = httpx.AsyncClient(
            timeout=config.timeout_s, headers=dict(headers or {}), trust_env=False
        )

    async def ask(
        self, messages: Sequence[Mapping[str, str]], *, temperature: float, max_tokens: int
    ) -> ChatAnswer:
        """Send one request. Raises ChatError for anything but a chat completion."""
        request = {
            "model": self._model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        try:
            response = await self._client.post(self._url, json=request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            words = self._without_secrets(f"{type(error).__name__}: {error}")
            raise ChatError(f"no answer: {words}") from None
        if response.status_code != 200:
            said = self._without_secrets(" ".join(response.text[:2000].split()))[:200]
            raise ChatError(
                f"HTTP status {response.status_code}: {said!a}", status=response.status_code
            )
        return _answer(response)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _answer(response: httpx.Response) -> ChatAnswer:
    try:
        choice = response.json()["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ChatError(f"not a chat completion: {type(error).__name__}") from error
    if content is not None and not isinstance(content, str):
        raise ChatError("not a chat completion: the content is no text")
    return ChatAnswer(text=content or "", finish_reason=reason if isinstance(reason, str) else "")
