"""`plan`: what a checkpoint would take at a budget, told before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tierstore.cli import options, words
from tierstore.cli.output import (
    Column,
    Document,
    Failure,
    data,
    draw,
    print_json,
    remark,
    system_failure,
)
from tierstore.completion import files
from tierstore.model.errors import TierStoreError
from tierstore.model.outline import OFFLOAD_TYPES
from tierstore.model.tiers import Tier

if TYPE_CHECKING:  # it brings numpy: only who plans shall wait for that
    from tierstore.cli.forecast import PlannedComponent

COMFORTABLE = 3
"""So many of the largest groups should have room: one in use, one arriving, one beside."""

_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@options.command(
    "plan",
    "plan FLUX.1-dev --ram 8GB",
    "plan FLUX.1-dev --ram 24GB --device 8GB --compute 1.5 --disk-bandwidth 5GB/s",
    "plan model.safetensors --ram 4GiB --json",
)
@click.argument("checkpoint", metavar="CHECKPOINT", shell_complete=files)
@click.option("--ram", type=options.ram, metavar="SIZE", required=True, help=options.ram_help)
@click.option("--device", type=options.device, metavar="SIZE", help=options.device_help)
@click.option(
    "--offload-type",
    type=click.Choice(OFFLOAD_TYPES),
    default=OFFLOAD_TYPES[0],
    show_default=True,
    help="How the model is cut, as in enable_group_offload.",
)
@click.option("--component", help="Only this component of a pipeline.")
@click.option(
    "--compute",
    type=options.seconds,
    help="Seconds that a step takes when all weights are in place. Left out: no time at all, so "
    "that the disk (or the link) is the limit.",
)
@click.option(
    "--disk-bandwidth",
    type=options.speed,
    help="Such as 3GB/s. Left out: what `bench` measured of this disk.",
)
@click.option(
    "--link-bandwidth",
    type=options.speed,
    help="From host memory to the device. Left out: no limit.",
)
@click.option(
    "--steps", type=click.IntRange(min=4), default=20, show_default=True, help="Steps to play."
)
def plan(  # noqa: PLR0913 - each is an option of the command
    checkpoint: str,
    ram: int,
    device: int | None,
    offload_type: str,
    component: str | None,
    compute: float | None,
    disk_bandwidth: float | None,
    link_bandwidth: float | None,
    steps: int,
    as_json: bool,
) -> None:
    """Predict what would stay in memory, and what each step would read, from headers alone.

    CHECKPOINT is a safetensors file, a directory with one or with several and an index, or the
    directory of a diffusers pipeline. Nothing but headers is read. The real planner is played
    through on paper. A step is one run of the model; pipelines with guidance may do two of them.
    """
    from tierstore.cli.disk_speed import known_speed
    from tierstore.cli.forecast import FROM_DISK, TO_DEVICE, forecast, in_every_step

    if device is None and link_bandwidth is not None:
        raise click.UsageError("--link-bandwidth is for --device; without it there is no link.")
    budgets = options.budgets_of(ram, device)
    components = _components(checkpoint, offload_type, budgets, component)
    _refuse_what_never_fits(components, budgets)
    measured = known_speed(checkpoint) if disk_bandwidth is None else None
    disk, link, computes = disk_bandwidth or measured, link_bandwidth, compute or 0.0
    speeds = {way: speed for way, speed in ((FROM_DISK, disk), (TO_DEVICE, link)) if speed}
    known = {group.key: group.nbytes for part in components for group in part.groups}
    document = {
        "checkpoint": checkpoint,
        "budgets": {tier.name: budget for tier, budget in budgets.items()},
        "disk_bandwidth": disk,
        "link_bandwidth": link,
        "compute_seconds": computes,
        "components": [_row(part) for part in components],
        "steps": [
            forecast(part, known, budgets, speeds, computes, steps)
            for part in in_every_step(components)
        ],
    }
    if as_json:
        print_json(document)
        return
    _show(document)
    if measured is not None:
        remark(f"Disk: {words.size(measured)}/s, as `tierstore-inspect bench` measured it.")
    elif disk is None:
        remark(
            "Seconds are not told, for the disk's speed is not known: give --disk-bandwidth, or "
            "measure it with `tierstore-inspect bench DIR`."
        )
    if compute is None and disk is not None:
        remark("Computing is taken to need no time: give --compute SECONDS of a step.")


def _components(
    checkpoint: str, offload_type: str, budgets: options.Budgets, only: str | None
) -> list[PlannedComponent]:
    from tierstore.cli.forecast import components_of

    try:
        components = components_of(checkpoint, offload_type, budgets, only)
    except (TierStoreError, OSError, ValueError) as error:
        raise _no_plan(checkpoint, error) from error
    if not any(component.groups for component in components):
        message = f"{checkpoint} holds no weights in safetensors files"
        raise Failure(message, "Give another CHECKPOINT.")
    return components


def _no_plan(checkpoint: str, error: Exception) -> Failure:
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, _NOTHING_THERE):
        return system_failure(cause, f"reading {checkpoint}")
    if isinstance(error, TierStoreError):
        return Failure(str(error), "Give another CHECKPOINT.")
    return Failure(
        f"{checkpoint} cannot be planned with: {error}",
        "Give one file, or a directory that holds each tensor once.",
    )


def _refuse_what_never_fits(
    components: Sequence[PlannedComponent], budgets: options.Budgets
) -> None:
    largest = max(
        (group for part in components for group in part.groups), key=lambda group: group.nbytes
    )
    for tier, option in ((Tier.HOST, "--ram"), (Tier.DEVICE, "--device")):
        budget = budgets.get(tier)
        if budget is None:
            continue
        if largest.nbytes > budget:
            raise Failure(
                f"{option} is too small: the group {largest.key!r} alone has "
                f"{largest.nbytes:,} bytes, and no module can be cut",
                f"Give at least {option} {largest.nbytes}B; "
                f"{COMFORTABLE * largest.nbytes}B would let reading and computing overlap.",
            )
        if COMFORTABLE * largest.nbytes > budget:
            remark(
                f"{option} has room for less than {COMFORTABLE} of the largest groups: reading "
                f"and computing will hardly overlap. {COMFORTABLE * largest.nbytes}B would do."
            )


def _largest(part: Document) -> int:
    return max((group["nbytes"] for group in part["groups"]), default=0)


_COMPONENTS = (
    Column("COMPONENT", lambda part: part["name"] or "model", flexible=True),
    Column("WEIGHTS", lambda part: words.size(part["nbytes"]), right=True),
    Column("GROUPS", lambda part: f"{len(part['groups']):,}", right=True),
    Column("LARGEST", lambda part: words.size(_largest(part)), right=True),
)


def _show(document: Document) -> None:
    sizes = {part["name"]: part["nbytes"] for part in document["components"]}
    draw(_COMPONENTS, document["components"])
    disk, link = document["disk_bandwidth"], document["link_bandwidth"]
    for step in document["steps"]:
        nbytes, stays = sizes[step["component"]], step["resident"]
        read, first, onloaded = (step[name] for name in ("read", "first_read", "onloaded"))
        data("")
        data(f"Each step of {step['component'] or 'the model'}:")
        data(
            f"  stays in memory  {words.size(stays)} of {words.size(nbytes)}, {stays / nbytes:.0%}"
        )
        data(f"  read from disk   {words.size(read)}; in the first step {words.size(first)}")
        if Tier.DEVICE.name in document["budgets"]:
            data(f"  to the device    {words.size(onloaded)}")
        if disk is not None:
            is_link = link and onloaded / link > read / disk
            data(
                f"  takes            {step['seconds']:.3g} s, of which "
                f"{step['stalled_seconds']:.3g} s are waiting for "
                f"{'the link to the device' if is_link else 'the disk'}"
            )


def _row(part: PlannedComponent) -> Document:
    groups = [
        {
            "key": group.key,
            "nbytes": group.nbytes,
            "tensors": [tensor.name for tensor in group.tensors],
        }
        for group in part.groups
    ]
    return {"name": part.name, "nbytes": part.nbytes, "groups": groups}
