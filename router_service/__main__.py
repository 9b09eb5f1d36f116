"""`python -m penstock.router_service`: a router, as one process or as the parent of several."""

import argparse
import sys

from penstock.services import telemetry
from penstock.services.access.listening import restricted
from penstock.services.domain.instances import Role
from penstock.services.mesh_file import load_mesh_file
from penstock.services.process_slot import ProcessSlot
from penstock.services.processes import exits_on_unusable_settings
from penstock.services.settings import ServiceSettings


def main() -> None:
    """Serve, or start as many processes as the settings say; each gets its slot on its command line."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.router_service", description="A router of a Penstock mesh."
    )
    parser.add_argument("--slot", type=ProcessSlot.from_json, help=argparse.SUPPRESS)  # set by the parent alone
    slot: ProcessSlot | None = parser.parse_args().slot
    if slot is None:
        with exits_on_unusable_settings(Role.ROUTER.value):
            settings = ServiceSettings.load()
            mesh = load_mesh_file(settings.mesh_file)
            count = settings.processes_of_router(mesh)
            if count > 1:
                from penstock.services.process_group import run_group

                telemetry.set_up_logging(Role.ROUTER.value, settings)
                settings = restricted(settings, mesh, Role.ROUTER)
                sys.exit(run_group(Role.ROUTER, "penstock.router_service", settings, count))
    from penstock.router_service.compose import compose  # these load gRPC, which a parent of processes must not
    from penstock.services.runtime import run_service

    run_service(Role.ROUTER, compose, slot)


if __name__ == "__main__":
    main()
