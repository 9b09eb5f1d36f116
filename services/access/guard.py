"""Decides, for one listener, whether a caller may make a call."""

from collections.abc import Callable, Mapping, Set

from penstock.services.access.roles import CallerRole, Listener, may_call
from penstock.services.domain.errors import PermissionDenied
from penstock.services.grpc_types import Context

IDENTITY_PREFIX = "spiffe://penstock/"
"""Certificates name the role of their holder in a URI: this, then the role."""

PUBLIC = "/grpc.health.v1."
"""Health may be asked without an API key."""

Authenticate = Callable[[Mapping[str, str]], None]
"""Recognises the caller by the headers of a call. Raises Unauthenticated."""


class CallGuard:
    """Refuses calls that the table of permissions does not allow.

    certificates: callers of this listener prove their role with a certificate; otherwise they have the roles that the
        listener trusts its callers to have.
    """

    def __init__(self, listener: Listener, *, certificates: bool) -> None:
        self._listener, self._certificates = listener, certificates
        self.authenticate: Authenticate | None = None
        """Set where callers need an API key: recognises the one of a call."""

    def check(self, method: str, context: Context) -> None:
        """Check one call (`/package.Service/Method`) before anything of it is read.

        Raises:
            PermissionDenied: The role of the caller may not make it.
            Unauthenticated: The API key is missing or not valid.
        """
        roles = certified_roles(context.auth_context()) if self._certificates else self._listener.trusted_roles
        if not may_call(method, roles):
            raise PermissionDenied(f"{method}: not for {_named(roles)} at the {self._listener.value} listener")
        if self.authenticate is not None and not method.startswith(PUBLIC):
            self.authenticate({key: str(value) for key, value in context.invocation_metadata() or ()})


def certified_roles(auth_context: Mapping[str, object]) -> Set[CallerRole]:
    """The role that the caller's certificate names, as a set; empty without one. TLS has verified the certificate."""
    names = auth_context.get("x509_subject_alternative_name", ())
    assert isinstance(names, list | tuple)
    prefix = IDENTITY_PREFIX.encode()
    roles = {str(name.removeprefix(prefix), "utf-8", "replace") for name in names if name.startswith(prefix)}
    return frozenset(role for role in CallerRole if role.value in roles and role is not CallerRole.CLIENT)


def _named(roles: Set[CallerRole]) -> str:
    return "callers without a role" if not roles else " or ".join(sorted(role.value for role in roles))
