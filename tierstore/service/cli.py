"""`tierstore-serve`: serves one directory to all processes of the same user on this machine."""

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
"""Seconds for workers to give leases back once the service is to end."""


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n"
    "  tierstore-serve /nvme/tierstore --ram 200GB\n"
    "  tierstore-serve /nvme/tierstore --ram auto --disk 1TB --metrics 9400",
)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, readable=False))
@click.option(
    "--ram", required=True, help="Host memory: 200GB, 50%, or auto (half of what is free)."
)
@click.option("--disk", default=None, help="What may be written to DIR. Left out: no limit.")
@click.option(
    "--socket",
    "path",
    default=None,
    type=click.Path(readable=False),
    help="Unix socket path (default: derived from DIR).",
)
@click.option("--metrics", type=int, default=None, help="Serve Prometheus metrics on this port.")
@click.option("--deadline", default=DEADLINE, show_default=True, help="Seconds to end in.")
def serve(
    directory: str,
    ram: str,
    disk: str | None,
    path: str | None,
    metrics: int | None,
    deadline: float,
) -> None:
    """Serve the weights of all processes of one user on this machine, from one host memory.

    Workers connect with TierStore.connect(SOCKET). Stays in the foreground; SIGTERM or Ctrl-C ends
    it. It answers as soon as its libraries are loaded; who connects before that waits.
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
        sockets.remove(path, made)  # where the next service may listen already


def _raise_limit_of_files() -> None:
    """Workers pass the descriptors of their files: as many as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    directory: str,
    options: tuple[str, str | None, int | None, float],
    listening: socket.socket,
    path: str,
    began: float,
) -> None:
    # Here, as it takes seconds: until then, who connects waits in the socket's queue.
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
        with extra_for("--metrics"):
            from tierstore.service.metrics import serve_metrics

        serve_metrics(server, metrics)
    log.info("ready after %.1f s: %s bytes of memory", time.monotonic() - began, f"{budget:,}")
    try:
        await server.run()
        log.info("ending: %d workers", len(server.connections))
    finally:
        await server.end(deadline)
    log.info("ended")
