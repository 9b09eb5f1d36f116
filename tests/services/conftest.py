"""A mesh's keys in Redis, and a connection to it."""

import uuid
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from penstock.services.state.connection import connect
from penstock.services.state.keys import Keys
from tests.support.services import RedisProcess


@pytest.fixture
def keys() -> Keys:
    return Keys(f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture
async def client(redis: RedisProcess) -> AsyncIterator[Redis]:
    made = connect(redis.url)
    yield made
    await made.aclose()
