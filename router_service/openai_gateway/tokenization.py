"""/tokenize and /detokenize, as vLLM and SGLang have them: by a worker of the tier, for workers have the tokenizers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Literal, TypeVar

from aiohttp import web
from pydantic import Field

from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.openai_gateway.bodies import RequestBodies
from penstock.router_service.openai_gateway.field_names import renamed_problems
from penstock.router_service.openai_gateway.json_values import StrictModel
from penstock.router_service.openai_gateway.schema import Message, TokenId, checked
from penstock.router_service.tenancy.tenancy import Tenancy
from penstock.services.access.tenants import estimated_tokens
from penstock.services.domain.errors import NotFound, Unavailable
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.types.problems import FieldProblem
from penstock.types.prompts import MAX_PROMPT_TOKENS, ChatPrompt, Prompt, TextPrompt, prompt_problems
from penstock.types.requests import MAX_MODEL_CHARS

IDS_AT_ONCE = 20_000  # written before other requests are served: some ms
TIMEOUT_S = 30.0
"""For one call: a text of the largest length takes a second or two, and as long again for each that waits before it."""

_Model = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
_T = TypeVar("_T")


class TokenizeRequest(StrictModel):
    """Text as /v1/completions continues it, or a chat as /v1/chat/completions renders it."""

    model: _Model
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    # accepted only at the value that the other endpoints have
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: Literal[False] | None = None

    def plain(self) -> Prompt:
        if self.messages is not None:
            return ChatPrompt(tuple(message.plain() for message in self.messages))
        return TextPrompt(self.prompt or "")

    def problems(self) -> Iterator[FieldProblem]:
        if (self.prompt is None) is (self.messages is None):
            yield FieldProblem("prompt", "exactly one of prompt and messages is needed")
        elif self.add_special_tokens not in (None, self.messages is None):
            yield FieldProblem("add_special_tokens", "must be true for a prompt and false for messages")
        else:
            yield from renamed_problems(prompt_problems(self.plain(), "prompt"))


class DetokenizeRequest(StrictModel):
    model: _Model
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


async def _json_list(ids: Sequence[int]) -> str:
    """A part of a JSON list. Other requests are served before the next part: a long text has millions of tokens."""
    await asyncio.sleep(0)
    return ", ".join(map(str, ids))


class TokenizationRoutes:
    """`cascade` means its first tier. A call counts as one request of its tenant, with the tokens of its text."""

    def __init__(self, view: MeshView, workers: WorkerClient, bodies: RequestBodies, tenancy: Tenancy) -> None:
        self._view, self._workers, self._bodies, self._tenancy = view, workers, bodies, tenancy

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._bodies.parsed(request, lambda content: checked(TokenizeRequest, content))
        prompt = body.plain()
        async with self._tenancy.admitted_text(body.model, estimated_tokens(prompt)) as admission:
            ids, context = await self._at_worker(
                body.model, lambda address: self._workers.tokens(address, prompt, TIMEOUT_S)
            )
            admission.used(len(ids))
        tokens = [await _json_list(ids[at : at + IDS_AT_ONCE]) for at in range(0, len(ids), IDS_AT_ONCE)]
        text = (
            f'{{"count": {len(ids)}, "max_model_len": {context}, "tokens": [{", ".join(tokens)}], "token_strs": null}}'
        )
        return web.json_response(text=text, headers=admission.headers)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._bodies.parsed(request, lambda content: checked(DetokenizeRequest, content))
        async with self._tenancy.admitted_text(body.model, len(body.tokens)) as admission:
            text = await self._at_worker(
                body.model, lambda address: self._workers.text(address, body.tokens, TIMEOUT_S)
            )
            admission.used(len(body.tokens))
        return web.json_response({"prompt": text}, headers=admission.headers)

    async def _at_worker(self, model: str, call: Callable[[str], Awaitable[_T]]) -> _T:
        """The result of the first worker of a model's tier that answers.

        Raises:
            NotFound: There is no such model.
            Unavailable: No worker of the tier answers.
        """
        tiers = self._view.plan.tiers if self._view.plan is not None else ()
        tier = next((tier.name for tier in tiers if model in (tier.name, CASCADE_MODEL)), None)
        if tier is None:
            raise NotFound("model", model)
        for worker in [*self._view.workers(tier), *self._view.expired_workers(tier)]:
            try:
                return await call(worker.address)
            except Unavailable:
                continue
        raise Unavailable(f"no worker of tier '{tier}' answers")
