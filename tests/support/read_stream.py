"""A request's reply as a client reads it, checked event by event."""

from collections.abc import AsyncIterator
from typing import Self

from penstock import Accepted, Event, Finished, InstanceChanged, TierStarted, Tokens


class ReadStream:
    """What has come of one reply. instances: at which a tier started with it, in order. Every token must come once."""

    def __init__(self, prompt: str) -> None:
        self.prompt, self.text, self.tokens, self.request_id = prompt, "", 0, ""
        self.events: list[Event] = []
        self.instances: list[str] = []
        self.changes: list[InstanceChanged] = []

    def see(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Accepted():
                self.request_id = event.request_id
            case TierStarted():
                self.instances.append(event.instance_id)
            case InstanceChanged():
                self.changes.append(event)
            case Tokens():
                assert event.offset == self.tokens, "a token twice, or one missing"
                self.tokens += len(event.token_ids)
                self.text += event.text

    async def read(self, events: AsyncIterator[Event]) -> Self:
        async for event in events:
            self.see(event)
        return self

    @property
    def finished(self) -> Finished:
        """The last event of a reply that is complete."""
        done = self.events[-1]
        assert isinstance(done, Finished)
        return done
