"""`tierstore-serve`: serves one directory to all processes of one user on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time

import click

from tierstore.errors import TierStoreError
from tierstore.model.extras import extra_for
from tierstore.model.sizes import parse_size
from tierstore.service import sockets

log = logging.getLogger("tierstore.service")

DEADLINE = 10.0
"""Seconds that workers have to release leases when the service ends."""


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n"
    "  tierstore-serve /nvme/tierstore --ram 200GB\n"
    "  tierstore-serve /nvme/tierstore --ram auto --disk 1TB --metrics 9400",
)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, readable=False))
@click.option(
    "--ram", required=True, help="Host memory: 200GB, 50%, or auto (half of the free memory)."
)
@click.option("--disk", default=None, help="Limit of bytes written to DIR (default: none).")
@click.option(
    "--socket",
    "path",
    default=None,
    type=click.Path(readable=False),
    help="Unix socket path (default: derived from DIR).",
)
@click.option("--metrics", type=int, default=None, help="Serve Prometheus metrics on this port.")
@click.option(
    "--deadline",
    default=DEADLINE,
    show_default=True,
    help="Seconds that workers have to release leases when the service ends.",
)
def serve(
    directory: str,
    ram: str,
    disk: str | None,
    path: str | None,
    metrics: int | None,
    deadline: float,
) -> None:
    """Serve the weights of all processes of one user on this machine, from one host memory.

    Workers connect with TierStore.connect(SOCKET). Runs in the foreground until SIGTERM or Ctrl-C.
    Answers as soon as its libraries are loaded; earlier connections wait.
    """
    began = time.monotonic()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    path = os.path.abspath(sockets.default_socket(directory) if path is None else path)
    try:
        listening = sockets.listen(path)
        made = sockets.identity(path)
    except (OSError, TierStoreError) as error:
        raise click.ClickException(str(error)) from error
    log.info("serving %s at %s (process %d)", os.path.abspath(directory), path, os.getpid())
    try:
        _raise_limit_of_files()
        asyncio.run(_serve(directory, (ram, disk, metrics, deadline), listening, path, began))
    except (OSError, ValueError, TierStoreError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        listening.close()
        sockets.remove(path, made)  # unless the next service already listens there


def _raise_limit_of_files() -> None:
    """Raise the descriptor limit to the system's maximum: workers pass open files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    directory: str,
    options: tuple[str, str | None, int | None, float],
    listening: socket.socket,
    path: str,
    began: float,
) -> None:
    # Imported here because it takes seconds: clients wait in the socket's queue meanwhile.
    with extra_for("to serve"):
        from tierstore.engine.settings import ram_bytes
        from tierstore.model.sizes import PAGE
        from tierstore.service.server import Server, settings_of

    ram, disk, metrics, deadline = options
    budget = ram_bytes(ram) // PAGE * PAGE
    settings = settings_of(directory, budget, None if disk is None else parse_size(disk))
    server = Server(settings, listening, path)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if metrics is not None:
        with extra_for("for --metrics"):
            from tierstore.service.metrics import serve_metrics

        serve_metrics(server, metrics)
    log.info("ready after %.1f s: %s bytes of memory", time.monotonic() - began, f"{budget:,}")
    try:
        await server.run()
        log.info("stopping, %d workers connected", len(server.connections))
    finally:
        await server.end(deadline)
    log.info("stopped")
