"""Separates the reasoning of a choice from its answer, on the way from the router to the reply."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.router_service.domain.events import RequestOutput, RouterEvent
from penstock.services.reasoning import ReasoningParser
from penstock.types.events import Finished
from penstock.types.replies import TokenFrame


@dataclass(slots=True)
class ReasoningOutput:
    """A RequestOutput in front of another one, which gets the answer alone.

    parser: of a tier's replies; None if its model does not reason. on_reasoning: called with the parts of the reasoning.
    """

    output: RequestOutput
    parser: Callable[[str], ReasoningParser | None]
    on_reasoning: Callable[[str], None]
    _parsing: ReasoningParser | None = None
    _begun: bool = False
    _tier: str = ""

    def answer(self, tier: str, frame: TokenFrame) -> None:
        if not self._begun:
            self._begun, self._parsing, self._tier = True, self.parser(tier), tier
        if self._parsing is None:
            self.output.answer(tier, frame)
            return
        reasoning, text = self._parsing.push(frame.text)
        self._pass(reasoning, replace(frame, text=text))

    def event(self, event: RouterEvent) -> None:
        if isinstance(event, Finished) and self._parsing is not None:
            reasoning, text = self._parsing.finish()
            self._pass(reasoning, TokenFrame(0, (), text))
        self.output.event(event)

    async def sent(self) -> None:
        await self.output.sent()

    def _pass(self, reasoning: str, frame: TokenFrame) -> None:
        if reasoning:
            self.on_reasoning(reasoning)
        if frame.text or frame.logprobs:
            self.output.answer(self._tier, frame)
