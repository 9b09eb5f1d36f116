"""What a mesh file says of tenants, keys and certificates."""

from pydantic import BaseModel, Field

from penstock.services.domain.errors import PermissionDenied, check
from penstock.services.mesh_schema.common import FROZEN
from penstock.types.problems import FieldProblem
from penstock.types.sampling import SamplingParams


class MeshTenant(BaseModel):
    """One tenant. A limit that is not set does not exist."""

    model_config = FROZEN

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Name of the tenant: 1 to 63 characters of a-z, 0-9, -, _ and `.`."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests (choices of a request count one by one) in any 60 s, at all routers together."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and replies in any 60 s, at all routers together. A request reserves an estimate of its prompt and
    its max_tokens, or 256; its reply's own number counts from its end."""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests at once, at all routers together."""
    models: tuple[str, ...] = ()
    """Models that its requests may name: `cascade` and tiers. Empty: all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest max_tokens of a request; also the limit of requests that set none."""
    max_n: int | None = Field(default=None, ge=1)
    """Largest number of choices of one HTTP request, prompts times n."""
    max_priority: int | None = Field(default=None, ge=-100, le=100)
    """Highest priority that its requests may have."""
    slo: bool = True
    """Whether its requests may ask for latencies."""
    ignore_eos: bool = False
    """Whether its requests may set ignore_eos: their replies then always have max_tokens. For benchmarks."""
    sample_prompts: bool = False
    """Whether the tenant consents that a share of its prompts is stored in Redis (`router.sample_prompts`)."""
    own_cache: bool = False
    """Whether its requests share the KV of prompts that begin alike with no other tenant's: then no other tenant learns from
    the time to the first token what it has sent, and what others have sent makes its prompts no faster."""
    slo_classes: tuple[str, ...] = ()
    """Classes of the mesh's `slo.classes` that its requests may name; they may then ask for no latencies of their own.
    Empty: all, and their own."""

    def allows_model(self, model: str) -> bool:
        return not self.models or model in self.models

    def cache_salt(self, salt: str) -> str:
        """What the salt of a request is to workers, so that no tenant can give that of another one's cache."""
        return f"{self.name if self.own_cache else ''}/{salt}" if self.own_cache or salt else ""

    def check(
        self, model: str, sampling: SamplingParams, choices: int, priority: int, *, slo_class: str | None
    ) -> None:
        """Check what a request asks for.

        slo_class: the name of its SLO class; empty for latencies of its own, None for no SLO.

        Raises:
            PermissionDenied: The model is not for this tenant.
            InvalidRequest: A field is above the tenant's limit; the error names every one.
        """
        if not self.allows_model(model):
            raise PermissionDenied(f"model: tenant '{self.name}' may not use it")
        max_tokens = sampling.max_tokens
        problems = [
            FieldProblem(name, f"at most {limit} for tenant '{self.name}', not {value}")
            for name, value, limit in (
                ("sampling.max_tokens", max_tokens, self.max_tokens),
                ("n", choices, self.max_n),
                ("priority", priority, self.max_priority),
            )
            if value is not None and limit is not None and value > limit
        ]
        if slo_class is not None and not self.slo:
            problems.append(FieldProblem("slo", f"not for tenant '{self.name}'"))
        elif slo_class is not None and self.slo_classes and slo_class not in self.slo_classes:
            allowed = ", ".join(self.slo_classes)
            problems.append(FieldProblem("slo.name", f"must be one of the classes of tenant '{self.name}': {allowed}"))
        if sampling.ignore_eos and not self.ignore_eos:
            problems.append(FieldProblem("sampling.ignore_eos", f"not for tenant '{self.name}'"))
        check(problems)


class MeshAccess(BaseModel):
    """Who may use the mesh."""

    model_config = FROZEN

    keys: str = ""
    """Key file, written by `penstock keys`; a relative path is resolved against the mesh file's folder. Empty: requests need
    no key, and routers listen on loopback only."""
    tenants: tuple[MeshTenant, ...] = ()
    """The tenants that keys belong to: see below."""


class MeshTls(BaseModel):
    """Certificates."""

    model_config = FROZEN

    folder: str = ""
    """Folder of the mesh's own certificates, written by `penstock certs`; a relative path is resolved against the mesh
    file's folder. With it, services accept each other and administrators by their certificates only, and clients use TLS.
    Empty: no TLS."""
    client_certificate: str = ""
    """PEM file of the certificate, with its chain, that clients of the routers see. Empty: the router's own."""
    client_key: str = ""
    """PEM file of its private key."""
