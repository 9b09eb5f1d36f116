"""Hands the outputs of steps to the streams of their requests, a few at a time, on the event loop.

A step of two hundred replies wakes as many tasks. Handed over at once they all run before anything that arrives meanwhile:
a new request, or the answer to one that asks for an SLO, would wait for all of them. So outputs are handed over in slices,
and the loop does in between what is waiting. The outputs of one request stay in their order.
"""

import asyncio
from collections import deque
from collections.abc import Sequence as Seq

from services.domain.errors import RequestFailed
from services.event_streams import EventStream
from worker_service.engine.core import StepOutput
from worker_service.engine.interface import Admitted, Declined, Finished, HandedOver, Verification

SLICE = 32
"""Outputs that are handed over at once: about half a millisecond of the readers' work."""


class Deliveries:
    """The outputs that are still to be handed over. Used by the event loop only."""

    def __init__(self, streams: dict[str, EventStream[StepOutput]]) -> None:
        """streams: of the requests; one that has its last output leaves it."""
        self._streams = streams
        self._outputs: deque[tuple[str, StepOutput]] = deque()

    def put(self, request_id: str, output: StepOutput) -> None:
        """Hand over an output; those of a request without a stream are dropped."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put(output)
            if isinstance(output, (Finished, HandedOver, Verification, RequestFailed)):
                del self._streams[request_id]

    def deliver(self, outputs: Seq[tuple[str, StepOutput]]) -> None:
        """Hand over the first slice, and the rest in the next rounds of the loop; answers to new requests go first."""
        if self._outputs:
            answers = [(name, output) for name, output in outputs if isinstance(output, Admitted | Declined)]
            waiting = {name for name, _ in self._outputs} if answers else set()
            early = [answer for answer in answers if answer[0] not in waiting]
            for answer in early:
                self.put(*answer)
            self._outputs.extend(output for output in outputs if output not in early)
            return
        self._outputs.extend(outputs)
        self._next_slice()

    def deliver_all(self) -> None:
        """Hand over everything now."""
        while self._outputs:
            self.put(*self._outputs.popleft())

    def deliver_of(self, request_id: str) -> None:
        """Hand over now what there is of one request: what follows belongs to another one of the same id."""
        own = [output for output in self._outputs if output[0] == request_id]
        if own:
            self._outputs = deque(output for output in self._outputs if output[0] != request_id)
            for output in own:
                self.put(*output)

    def _next_slice(self) -> None:
        for _ in range(min(SLICE, len(self._outputs))):
            self.put(*self._outputs.popleft())
        if self._outputs:
            asyncio.get_running_loop().call_soon(self._next_slice)
