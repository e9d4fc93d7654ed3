"""The command `plan`: a forecast for a checkpoint at some budgets, before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tierstore.cli import options
from tierstore.cli.output import Column, Document, Failure, data, draw, print_json, remark
from tierstore.errors import TierStoreError, TransferError
from tierstore.forecasting.budgets import Budget
from tierstore.model.formatting import Units, at_least, decimals, size
from tierstore.model.outline import OFFLOAD_TYPES
from tierstore.model.weight_files import SUFFIX
from tierstore.progress import bar
from tierstore.system.files import transfer_error

if TYPE_CHECKING:  # these import numpy, which would slow down other commands
    from tierstore.forecasting.forecast import Partition
    from tierstore.forecasting.sources import CheckpointSource, FoundModels
    from tierstore.forecasting.trials import Advice, Trial

_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@options.command(
    "plan",
    "plan path/to/pipeline",
    "plan black-forest-labs/FLUX.1-dev --ram 8GB --ram auto",
    "plan path/to/pipeline --device 8GB --compute 1.5",
    "plan model.safetensors --ram 4GiB --json",
)
@click.argument("checkpoint", metavar="CHECKPOINT", shell_complete=options.complete_files)
@options.ram_option
@click.option(
    "--device",
    type=options.device,
    metavar="SIZE",
    help="device_budget of the store (default: compute on the CPU).",
)
@click.option(
    "--offload-type",
    type=click.Choice(OFFLOAD_TYPES),
    default=OFFLOAD_TYPES[0],
    show_default=True,
    help="Partitioning of the model, as in enable_group_offload.",
)
@click.option("--component", help="Plan only this component of a pipeline.")
@click.option("--variant", help="Variant for from_pretrained, such as fp16.")
@click.option(
    "--compute",
    type=options.seconds_of_step,
    metavar="TIME",
    help="Time of a step with all weights resident: seconds (1.5), or the figure of a progress bar "
    "(1.5s/it, 3.2it/s). Default: none, so that only the disk (or the link) limits the speed.",
)
@click.option(
    "--disk-bandwidth",
    type=options.speed,
    help="Read speed of the disk, such as 3GB/s (default: as measured by `bench`).",
)
@click.option(
    "--link-bandwidth",
    type=options.speed,
    help="Speed from host memory to the device (default: no limit).",
)
@click.option(
    "--steps", type=click.IntRange(min=4), default=20, show_default=True, help="Steps to simulate."
)
@click.option("--groups", is_flag=True, help="With --json: list the groups and their tensors.")
def plan(  # noqa: PLR0913 - each is an option of the command
    checkpoint: str,
    rams: tuple[Budget, ...],
    device: Budget | None,
    offload_type: str,
    component: str | None,
    variant: str | None,
    compute: float | None,
    disk_bandwidth: float | None,
    link_bandwidth: float | None,
    steps: int,
    groups: bool,
    as_json: bool,
) -> None:
    """Find the smallest ram_budget that is enough for a model.

    CHECKPOINT is a safetensors file, a directory with one file or with several and an index, the
    directory of a diffusers pipeline, the URL of one of these, or the id of a model in the Hugging
    Face hub, downloaded or not. Reads only file headers. Without --ram, tries a range of budgets,
    from three of its largest groups to the whole model.

    Simulates the store's planner. A step is one run of the model; a pipeline with guidance may run
    it twice per denoising step. A budget is enough if a step takes at most 5 % longer than with all
    weights in RAM; if times are unknown, if a step reads nothing. Sizes are in the units of the
    given budgets, by default in powers of 1000 (1 MB is 1,000,000 bytes).
    """
    if device is None and link_bandwidth is not None:
        raise click.UsageError("--link-bandwidth requires --device.")
    if groups and not as_json:
        raise click.UsageError("--groups requires --json.")
    from tierstore.forecasting.forecast import FROM_DISK, TO_DEVICE, Conditions
    from tierstore.forecasting.sources import source_of
    from tierstore.forecasting.trials import Trials, ladder
    from tierstore.tiers.disk_speed import known_speed

    source = source_of(checkpoint, remark)
    found = _models(source, checkpoint, component, variant)
    measured = known_speed(source.disk) if source.disk and disk_bandwidth is None else None
    disk, link = disk_bandwidth or measured, link_bandwidth
    speeds = {way: speed for way, speed in ((FROM_DISK, disk), (TO_DEVICE, link)) if speed}
    conditions = Conditions(
        offload_type, device.nbytes if device else None, speeds, compute or 0.0, steps
    )
    units = options.units_typed([*rams, device]) or Units.DECIMAL
    tried = dict.fromkeys(rams or ladder(found.models, conditions))
    in_order = sorted(tried, key=lambda budget: budget.nbytes)
    simulated = Trials(found.models, conditions)
    trials = [simulated.simulate(budget) for budget in bar(in_order, "Planning", "budgets")]
    if all(trial.problem for trial in trials):
        raise Failure(str(trials[-1].problem), trials[-1].remedy)
    advice = simulated.advice(trials, units)
    document = {
        "checkpoint": checkpoint,
        "source": source.described or checkpoint,
        "device": conditions.device,
        "disk_bandwidth": disk,
        "link_bandwidth": link,
        "compute_seconds": conditions.compute,
        "components": [
            {
                "name": model.name,
                "nbytes": model.nbytes,
                "tensors": len(model.tensors),
                "dtypes": sorted({tensor.dtype for tensor in model.tensors}),
            }
            for model in found.models
        ],
        "plans": [_plan(trial, advice, groups) for trial in trials],
        "advice": {
            "ram_budget": advice.budget.text,
            "ram": advice.budget.nbytes,
            "tried": advice.of_tried,
            "text": advice.text,
        },
    }
    if as_json:
        print_json(document)
        return
    table = _Table(units, device is not None, disk is not None, compute is not None)
    _show(trials, document, advice, table)
    _remark_on(trials, found, source, advice, units)
    if measured is not None:
        remark(f"Disk: {size(measured, units)}/s, as measured by `tierstore-inspect bench`.")
    elif disk is None:
        remark(
            "No times, because the speed of the disk is unknown: give --disk-bandwidth, or measure "
            "it with `tierstore-inspect bench DIR`."
        )
    if compute is None and disk is not None:
        remark(
            "Computing counts as instant. Give the time of a step, --compute TIME (such as 1.5s/it "
            "from a progress bar): a smaller budget may then be enough."
        )


def _models(
    source: CheckpointSource, typed: str, only: str | None, variant: str | None
) -> FoundModels:
    from tierstore.forecasting.sources import models_of

    try:
        return models_of(source, typed, only, variant)
    except (TierStoreError, OSError, ValueError) as error:
        raise _no_plan(typed, error) from error


def _no_plan(checkpoint: str, error: Exception) -> Exception:
    from tierstore.forecasting.sources import CheckpointError

    if isinstance(error, CheckpointError):
        return error
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, _NOTHING_THERE):
        return transfer_error(cause, "reading", key=None, path=checkpoint)
    if checkpoint.endswith(".json") and SUFFIX not in str(error):  # an index names its shards
        place = os.path.dirname(checkpoint) or "."
        return Failure(f"{checkpoint} is not a checkpoint", f"Give its directory: {place}")
    if isinstance(error, TransferError) and isinstance(cause, FileNotFoundError):
        return CheckpointError(
            f"{checkpoint} is incomplete: there is no file {error.path}. Download it again, or "
            "give another CHECKPOINT"
        )
    if isinstance(error, TierStoreError):
        return CheckpointError(str(error))
    return Failure(
        f"{checkpoint} cannot be planned: {error}",
        "Give one file, or a directory that contains each tensor once.",
    )


def _plan(trial: Trial, advice: Advice, with_groups: bool) -> Document:
    row = {
        "ram_budget": trial.budget.text,
        "ram": trial.budget.nbytes,
        "problem": trial.problem,
        "overlaps": trial.overlaps,
        "enough": trial.budget == advice.budget,
        "group_count": sum(len(part.groups) for part in trial.partition.components),
        "largest_group": trial.partition.largest.nbytes,
        "steps": list(trial.steps),
    }
    return {**row, "components": _groups(trial.partition)} if with_groups else row


def _groups(partition: Partition) -> list[Document]:
    return [
        {
            "name": part.name,
            "nbytes": part.nbytes,
            "groups": [
                {
                    "key": group.key,
                    "nbytes": group.nbytes,
                    "tensors": [tensor.name for tensor in group.tensors],
                }
                for group in part.groups
            ],
        }
        for part in partition.components
    ]


@dataclass(frozen=True)
class _Table:
    """Columns and units of the table of budgets."""

    units: Units
    device: bool
    timed: bool
    computes: bool

    def size(self, nbytes: int) -> str:
        return size(nbytes, self.units)

    def columns(self, rows: Sequence[Document]) -> list[Column]:
        places = decimals(row.get("seconds") or 0.0 for row in rows)

        def share_waited(step: Document) -> str:
            return f"{step['stalled_seconds'] / max(step['seconds'], 1e-12):.0%}"

        columns = [
            Column("RAM", lambda row: str(row["ram"])),
            _of_step("STAYS", lambda step: self.size(step["resident"])),
            _of_step("READ", lambda step: self.size(step["read"])),
        ]
        if self.device:
            columns.append(_of_step("ONLOADED", lambda step: self.size(step["onloaded"])))
        if self.timed:
            title = "SECONDS" if self.computes else "SECONDS TO READ"
            columns.append(_of_step(title, lambda step: f"{step['seconds']:.{places}f}"))
        if self.timed and self.computes:
            columns.append(_of_step("WAITED", share_waited))
        return [*columns, Column("", lambda row: str(row["note"]))]


def _of_step(title: str, form: Callable[[Document], str]) -> Column:
    return Column(title, lambda row: form(row) if "component" in row else "-", right=True)


def _show(trials: Sequence[Trial], document: Document, advice: Advice, table: _Table) -> None:
    components = (
        Column("COMPONENT", lambda part: part["name"] or "model", flexible=True),
        Column("WEIGHTS", lambda part: table.size(part["nbytes"]), right=True),
        Column("TENSORS", lambda part: f"{part['tensors']:,}", right=True),
        Column("DTYPES", lambda part: ",".join(part["dtypes"])),
    )
    draw(components, document["components"])
    names = next(plan["steps"] for plan in document["plans"] if plan["steps"])
    for number, named in enumerate(names):
        rows = [
            {
                "ram": trial.budget.formatted(table.units),
                "note": _note(trial, advice),
                **(trial.steps[number] if trial.steps else {}),
            }
            for trial in trials
        ]
        data("")
        data(f"Each step of {named['component'] or 'the model'}:")
        draw(table.columns(rows), rows)
    data("")
    data(advice.text)


def _note(trial: Trial, advice: Advice) -> str:
    if trial.problem is not None:
        return "too small"
    if trial.budget == advice.budget:
        return "enough"
    return "no overlap" if _is_too_narrow(trial, advice) else ""


def _is_too_narrow(trial: Trial, advice: Advice) -> bool:
    """Return whether steps wait because there is no space to read while computing."""
    is_less_than_enough = trial.budget.nbytes < advice.budget.nbytes
    return trial.problem is None and not trial.overlaps and is_less_than_enough


def _remark_on(
    trials: Iterable[Trial],
    found: FoundModels,
    source: CheckpointSource,
    advice: Advice,
    units: Units,
) -> None:
    from tierstore.forecasting.trials import COMFORTABLE

    if source.described:
        remark(f"Read: {source.described}.")
    if found.pickles:
        remark(f"Skipped, because only torch pickles exist: {', '.join(found.pickles)}.")
    for trial in trials:
        if trial.problem is not None:
            remark(f"{trial.problem}. {trial.remedy}")
    narrow = [trial for trial in trials if _is_too_narrow(trial, advice)]
    if narrow:
        enough = at_least(COMFORTABLE * narrow[-1].partition.largest.nbytes, units)
        remark(
            f"--ram {narrow[-1].budget.text} holds fewer than {COMFORTABLE} of the largest "
            f"groups, so reading and computing hardly overlap. {enough} is enough for that."
        )
