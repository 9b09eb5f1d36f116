"""One reply from the parts that several instances send. No I/O."""

from collections.abc import Callable

from penstock.router_service.domain.failures import Failure, InstanceFailed
from penstock.services.event_streams import OnTokens
from penstock.types.events import InstanceChanged, TierAdmitted, TierDeclined, TierStarted
from penstock.types.replies import TokenFrame

TierEvent = TierStarted | TierAdmitted | TierDeclined | InstanceChanged
"""What a client sees of a tier's reply, except its tokens and its end."""
OnTierEvent = Callable[[TierEvent], None]


class ReplyAssembler:
    """Joins the frames of several instances into one reply, and reports each instance once it sends something.

    token_ids: of the whole reply so far. instance_id: of the instance that is tried now. began_at: output position where it
    began. max_output_tokens: None before an instance has admitted the request. reported: whether any instance was reported.
    """

    def __init__(
        self, tier: str, token_ids: tuple[int, ...], prompt_tokens: int, on_event: OnTierEvent, on_tokens: OnTokens
    ) -> None:
        """prompt_tokens: an estimate, until an instance has counted them."""
        self.tier, self.token_ids, self.prompt_tokens = tier, list(token_ids), prompt_tokens
        self.max_output_tokens: int | None = None
        self._on_event, self._on_tokens = on_event, on_tokens
        self._reported_id = ""
        self.try_instance("", "")

    @property
    def reported(self) -> bool:
        return bool(self._reported_id)

    @property
    def is_full_length(self) -> bool:
        """Whether the reply has all tokens that it may have."""
        return self.max_output_tokens is not None and len(self.token_ids) >= self.max_output_tokens

    def try_instance(self, instance_id: str, reason: str) -> None:
        """The next instance is tried. reason: why the previous one was left, for the client."""
        self.instance_id, self._reason = instance_id, reason
        self.began_at = len(self.token_ids)
        self._begun = False  # whether this instance has sent anything

    def new_tokens(self, instance_id: str) -> int:
        """Number of tokens from an instance, as far as it is the one that is tried now."""
        return len(self.token_ids) - self.began_at if instance_id == self.instance_id else 0

    def admitted(self, event: TierAdmitted) -> None:
        """The instance has admitted the request."""
        self.max_output_tokens, self.prompt_tokens = event.max_output_tokens, event.prompt_tokens
        self.begin()
        self._on_event(event)

    def declined(self, event: TierDeclined) -> None:
        """The instance cannot keep the request's SLO. It is not reported: the reply has not begun there."""
        self._on_event(event)

    def moved(self, instance_id: str, reason: str) -> None:
        """The reply continues on another instance."""
        self.begin()
        offset = len(self.token_ids)
        event = InstanceChanged(self.tier, self.instance_id, instance_id, offset, reason, moved=True)
        self.instance_id = self._reported_id = instance_id
        self.began_at = offset
        self._on_event(event)

    def begin(self) -> None:
        """Report the instance, unless that has been done."""
        if self._begun:
            return
        self._begun = True
        before, self._reported_id = self._reported_id, self.instance_id
        if before:
            self._on_event(InstanceChanged(self.tier, before, self.instance_id, len(self.token_ids), self._reason))
        else:
            self._on_event(TierStarted(self.tier, self.instance_id))

    def take(self, frame: TokenFrame) -> None:
        """Pass the frame on if it is the next one.

        Raises:
            InstanceFailed: Tokens are missing, come twice, or come before the instance has admitted the request.
        """
        if not self._begun:
            raise InstanceFailed(Failure.PROTOCOL_ERROR, "tokens before the request was admitted")
        if frame.offset != len(self.token_ids):
            message = f"a frame at offset {frame.offset} instead of {len(self.token_ids)}"
            raise InstanceFailed(Failure.PROTOCOL_ERROR, message)
        self.token_ids += frame.token_ids
        self._on_tokens(frame)
