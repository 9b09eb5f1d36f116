"""Sampled prompts in Redis: written by routers, read for `penstock measure --live`, capped in number and age."""

from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.services.domain.prompt_samples import PromptSample
from penstock.services.state.connection import StateUnavailable, as_bytes, state_errors
from penstock.services.state.keys import Keys
from penstock.services.state.stream_pages import page_of


class PromptSampleStore:
    """The last `max_prompts` prompts, none of them older than `max_age_s` seconds by Redis's clock.

    What is older is never read, goes with the next write, and at the latest `max_age_s` after the last write.
    """

    def __init__(self, redis: Redis, keys: Keys, max_prompts: int, max_age_s: float) -> None:
        self._redis, self._key, self._max_prompts, self._max_age_s = redis, keys.prompts, max_prompts, max_age_s

    async def append(self, samples: Sequence[PromptSample]) -> None:
        """Add prompts at the end, and remove what is too much or too old.

        Raises:
            StateUnavailable: Redis cannot be reached.
        """
        oldest = await self._oldest()
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                for each in samples[-self._max_prompts :]:
                    pipe.xadd(self._key, {"p": each.to_json()}, maxlen=self._max_prompts, approximate=False)
                pipe.xtrim(self._key, minid=oldest, approximate=False)
                pipe.pexpire(self._key, int(self._max_age_s * 1000))
                await pipe.execute()
        except (RedisError, OSError, TimeoutError) as error:
            # the driver's message quotes the command, and with it the prompt, which must not be logged
            raise StateUnavailable(f"Redis did not take sampled prompts ({type(error).__name__})") from None

    async def page(self, before: str, size: int) -> tuple[list[PromptSample], str]:
        """(at most `size` prompts, the newest first; the token of the next page).

        Raises:
            InvalidRequest, StateUnavailable: See page_of.
        """
        rows, next_token = await page_of(self._redis, self._key, before, size, await self._oldest())
        return [PromptSample.from_json(as_bytes(fields[b"p"])) for fields in rows], next_token

    async def delete(self) -> None:
        """Delete all prompts.

        Raises:
            StateUnavailable: Redis cannot be reached.
        """
        with state_errors():
            await self._redis.delete(self._key)

    async def _oldest(self) -> str:
        """The id of the oldest entry that may be kept."""
        with state_errors():
            seconds, _ = await self._redis.time()
        return f"{max(0, int((seconds - self._max_age_s) * 1000))}-0"
