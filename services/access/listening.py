"""Where a service listens: on loopback only, where its callers need neither an API key nor a certificate."""

import logging

from penstock.services.access.roles import listening_host
from penstock.services.domain.instances import Role
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.settings import ServiceSettings

_log = logging.getLogger(__name__)


def restricted(settings: ServiceSettings, mesh: MeshFile, role: Role) -> ServiceSettings:
    """The settings with the addresses that this service may listen on; what changes is logged."""
    certificates = settings.certificate_folder(mesh) is not None, "certificates"
    keys = settings.key_file(mesh) is not None, "API keys (access.keys)"
    proofs = {"bind_host": keys if role is Role.ROUTER else certificates, "admin_host": certificates}
    changes = {}
    for name, (authenticated, proof) in proofs.items():
        host: str = getattr(settings, name)
        allowed = listening_host(host, authenticated=authenticated, open_access=settings.open_access)
        if allowed != host:
            changes[name] = allowed
            _log.warning(
                "%s %s: without %s this service listens on %s only; PENSTOCK_OPEN_ACCESS=true allows callers without",
                name, host, proof, allowed,
            )  # fmt: skip
    return settings.model_copy(update=changes) if changes else settings
