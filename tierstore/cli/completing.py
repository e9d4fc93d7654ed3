"""What can be typed next: keys of the directory that was typed before, and services that run."""

from __future__ import annotations

import itertools
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from tierstore.cli.output import Failure
from tierstore.cli.report import survey
from tierstore.completion import Items, directories, typed_path
from tierstore.engine.directories import chosen_directory
from tierstore.service import sockets


def keys_of(directory: str | None) -> list[str]:
    """The keys of a store's directory, as it was typed; none if it cannot be looked at.

    What a shell takes for two lines, or what could steer the terminal, is left out.
    """
    with suppress(Failure, OSError):
        groups = survey(typed_path(directory)).groups if directory else []
        return sorted(group.key for group in groups if group.key and group.key.isprintable())
    return []


def keys(context: click.Context, _: click.Parameter | None, incomplete: str) -> Items:
    """Keys of DIR that begin so, and were not typed yet."""
    typed = context.params.get("keys") or ()
    found = keys_of(context.params.get("directory"))
    return [CompletionItem(k) for k in found if k.startswith(incomplete) and k not in typed]


def directory_or_key(context: click.Context, _: click.Parameter | None, incomplete: str) -> Items:
    """A directory, or a key of the default one; after a directory, a key of that."""
    typed = context.params.get("names") or ()
    found = keys_of(typed[0] if typed else chosen_directory(None))
    items = [] if typed else directories(context, None, incomplete)
    return items + [CompletionItem(key) for key in found if key.startswith(incomplete)]


def prefixes(context: click.Context, _: click.Parameter | None, incomplete: str) -> Items:
    """How keys of DIR begin: up to each of their slashes."""
    found: set[str] = set()
    # Where an option still wants its value, click has not told arguments apart.
    directory = context.args[0] if context.args else context.params.get("directory")
    for key in keys_of(directory):
        found.update(itertools.accumulate(f"{part}/" for part in key.split("/")[:-1]))
    return [CompletionItem(prefix) for prefix in sorted(found) if prefix.startswith(incomplete)]


def sources(context: click.Context, _: click.Parameter | None, incomplete: str) -> Items:
    """Where services listen, or what they may serve."""
    running = [path for path in sockets.running() if path.startswith(typed_path(incomplete))]
    found = [CompletionItem(path, help="a service") for path in running]
    return found + directories(context, None, incomplete)
