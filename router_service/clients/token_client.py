"""The calls of WorkerService about texts: tokenize, detokenize."""

from collections.abc import Sequence

from penstock.mapper import write
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import errors
from penstock.services.channels import ChannelPool
from penstock.types.prompts import Prompt


class TokenClient:
    """Tokenizes at any worker by address."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def tokens(self, address: str, prompt: Prompt, timeout_s: float) -> tuple[Sequence[int], int]:
        """(token ids of a prompt, tokens of a prompt and its reply at most).

        Raises:
            PenstockError: The worker's error.
        """
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        request = pb.TokenizeRequest()
        write(prompt, request.prompt)
        with errors.of_calls():
            response = await stub.Tokenize(request, timeout=timeout_s)
        return response.token_ids, response.max_context_tokens

    async def text(self, address: str, token_ids: Sequence[int], timeout_s: float) -> str:
        """The text of tokens.

        Raises:
            PenstockError: The worker's error.
        """
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        with errors.of_calls():
            response = await stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), timeout=timeout_s)
        text: str = response.text
        return text
