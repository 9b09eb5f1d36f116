"""HTTP endpoints that score answers."""

from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp

from penstock.services.domain.errors import DeadlineExceeded, Overloaded, RequestFailed, Unavailable
from penstock.services.retry_after import retry_after_s

_T = TypeVar("_T")


class Endpoint:
    """One URL that JSON is posted to. api_key: a bearer token. Errors do not quote responses, which may quote prompts."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)

    async def close(self) -> None:
        await self._session.close()

    async def post(self, body: object, read: Callable[[Any], _T]) -> _T:
        """What `read` makes of the response to a request.

        Raises:
            Overloaded: The endpoint has no capacity.
            RequestFailed: It refused the request.
            DeadlineExceeded: It did not answer in time.
            Unavailable: It cannot be reached, or its response is not as expected.
        """
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status in (429, 503):
                    raise Overloaded(f"{self._url} is full", retry_after_s(response.headers))
                if response.status == 400:
                    raise RequestFailed(f"{self._url} refused the request")
                if response.status != 200:
                    raise Unavailable(f"{self._url} answered {response.status}")
                return read(await response.json())
        except TimeoutError:
            raise DeadlineExceeded(f"{self._url} gave no answer within {self._timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._url}: {error!r}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._url}: unexpected response: {error!r}") from error
