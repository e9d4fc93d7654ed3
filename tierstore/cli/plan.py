"""`plan`: what a checkpoint would take at some budgets, told before it is loaded, and which of them
is enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tierstore.cli import budgets, options, words
from tierstore.cli.budgets import COMFORTABLE, Budget
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
from tierstore.model.weight_files import SUFFIX
from tierstore.progress import bar

if TYPE_CHECKING:  # they bring numpy: only who plans shall wait for that
    from tierstore.cli.advice import Advice, Trial
    from tierstore.cli.contents import FoundModels
    from tierstore.cli.forecast import Cut
    from tierstore.cli.sources import CheckpointSource

_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@options.command(
    "plan",
    "plan path/to/pipeline",
    "plan black-forest-labs/FLUX.1-dev --ram 8GB --ram auto",
    "plan path/to/pipeline --device 8GB --compute 1.5",
    "plan model.safetensors --ram 4GiB --json",
)
@click.argument("checkpoint", metavar="CHECKPOINT", shell_complete=files)
@budgets.ram_option
@click.option(
    "--device",
    type=budgets.device,
    metavar="SIZE",
    help="The store's device_budget. Left out: everything is computed on the CPU.",
)
@click.option(
    "--offload-type",
    type=click.Choice(OFFLOAD_TYPES),
    default=OFFLOAD_TYPES[0],
    show_default=True,
    help="How the model is cut, as in enable_group_offload.",
)
@click.option("--component", help="Only this component of a pipeline.")
@click.option("--variant", help="The variant that from_pretrained is asked for, such as fp16.")
@click.option(
    "--compute",
    type=options.seconds_of_step,
    metavar="TIME",
    help="How long a step takes when all weights are in place: seconds (1.5), or what a progress "
    "bar shows (1.5s/it, 3.2it/s). Left out: no time at all, so that the disk (or the link) is the "
    "limit.",
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
@click.option("--groups", is_flag=True, help="With --json: list groups, and the tensors of each.")
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
    """Tell which ram_budget is enough for a model, from the headers of its files alone.

    CHECKPOINT is a safetensors file, a directory with one or with several and an index, the
    directory of a diffusers pipeline, the URL of one of these, or the id of a model in the Hugging
    Face hub, whether it was downloaded or not. Nothing but headers is read. Left out --ram, budgets
    from what the largest modules need to all weights are tried.

    The real planner is played through on paper. A step is one run of the model; pipelines with
    guidance may do two of them. Enough is the smallest budget with which a step takes at most 5 %
    longer than with all weights in RAM; if that is not known, with which it reads nothing.
    """
    if device is None and link_bandwidth is not None:
        raise click.UsageError("--link-bandwidth is for --device; without it there is no link.")
    if groups and not as_json:
        raise click.UsageError("--groups is for --json.")
    from tierstore.cli.advice import Trials, ladder
    from tierstore.cli.disk_speed import known_speed
    from tierstore.cli.forecast import FROM_DISK, TO_DEVICE, Conditions
    from tierstore.cli.sources import source_of

    source = source_of(checkpoint)
    contents = _contents(source, checkpoint, component, variant)
    measured = known_speed(source.disk) if source.disk and disk_bandwidth is None else None
    disk, link = disk_bandwidth or measured, link_bandwidth
    speeds = {way: speed for way, speed in ((FROM_DISK, disk), (TO_DEVICE, link)) if speed}
    conditions = Conditions(
        offload_type, device.nbytes if device else None, speeds, compute or 0.0, steps
    )
    units = budgets.units_typed([*rams, device]) or words.Units.DECIMAL
    tried = dict.fromkeys(rams or ladder(contents.models, conditions))
    trials = Trials(contents.models, conditions)
    in_order = sorted(tried, key=lambda budget: budget.nbytes)
    found = [trials.tried(budget) for budget in bar(in_order, "Planning", "budgets")]
    _refuse_if_all_are_too_small(found)
    advice = trials.advice(found, units)
    document = {
        "checkpoint": checkpoint,
        "source": source.told or checkpoint,
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
            for model in contents.models
        ],
        "plans": [_plan(trial, advice, groups) for trial in found],
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
    look = _Look(units, device is not None, disk is not None, compute is not None)
    _show(found, document, advice, look)
    _remark_on(found, contents, source, advice, look)
    if measured is not None:
        remark(f"Disk: {words.size(measured, units)}/s, as `tierstore-inspect bench` measured it.")
    elif disk is None:
        remark(
            "Seconds are not told, for the disk's speed is not known: give --disk-bandwidth, or "
            "measure it with `tierstore-inspect bench DIR`."
        )
    if compute is None and disk is not None:
        remark(
            "Computing is taken to need no time: give --compute TIME of a step (such as 1.5s/it, "
            "from a progress bar), and a smaller budget may turn out to be enough."
        )


# What is read -------------------------------------------------------------------------------------


def _contents(
    source: CheckpointSource, typed: str, only: str | None, variant: str | None
) -> FoundModels:
    from tierstore.cli.contents import contents_of

    try:
        found = contents_of(source, typed, only, variant)
    except (TierStoreError, OSError, ValueError) as error:
        raise _no_plan(typed, error) from error
    if not any(model.nbytes for model in found.models):
        message = f"{typed} has no weights in safetensors files"
        if found.pickles:
            message += ", only torch pickles, which are not read"
        raise Failure(message, "Give another CHECKPOINT, or convert it with safetensors.")
    return found


def _no_plan(checkpoint: str, error: Exception) -> Failure:
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, _NOTHING_THERE):
        return system_failure(cause, f"reading {checkpoint}")
    if checkpoint.endswith(".json") and SUFFIX not in str(error):  # an index names its shards
        place = os.path.dirname(checkpoint) or "."
        return Failure(f"{checkpoint} is no checkpoint", f"Give its directory: {place}")
    if isinstance(error, TierStoreError):
        return Failure(str(error), "Give another CHECKPOINT.")
    return Failure(
        f"{checkpoint} cannot be planned with: {error}",
        "Give one file, or a directory that has each tensor once.",
    )


def _refuse_if_all_are_too_small(trials: Sequence[Trial]) -> None:
    problem = trials[-1].problem
    if problem is not None and all(trial.problem for trial in trials):
        raise problem


# What is told -------------------------------------------------------------------------------------


def _plan(trial: Trial, advice: Advice, with_groups: bool) -> Document:
    row = {
        "ram_budget": trial.budget.text,
        "ram": trial.budget.nbytes,
        "problem": None if trial.problem is None else str(trial.problem),
        "overlaps": trial.overlaps,
        "enough": trial.budget == advice.budget,
        "group_count": sum(len(part.groups) for part in trial.cut.components),
        "largest_group": trial.cut.largest.nbytes,
        "steps": list(trial.steps),
    }
    return {**row, "components": _groups(trial.cut)} if with_groups else row


def _groups(parts: Cut) -> list[Document]:
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
        for part in parts.components
    ]


def _show(trials: Sequence[Trial], document: Document, advice: Advice, look: _Look) -> None:
    size = look.size
    components = (
        Column("COMPONENT", lambda part: part["name"] or "model", flexible=True),
        Column("WEIGHTS", lambda part: size(part["nbytes"]), right=True),
        Column("TENSORS", lambda part: f"{part['tensors']:,}", right=True),
        Column("DTYPES", lambda part: ",".join(part["dtypes"])),
    )
    draw(components, document["components"])
    names = next(plan["steps"] for plan in document["plans"] if plan["steps"])
    for number, named in enumerate(names):
        rows = [
            {
                "ram": trial.budget.shown(look.units),
                "note": _note(trial, advice),
                **(trial.steps[number] if trial.steps else {}),
            }
            for trial in trials
        ]
        data("")
        data(f"Each step of {named['component'] or 'the model'}:")
        draw(look.columns(rows), rows)
    data("")
    data(advice.text)


@dataclass(frozen=True)
class _Look:
    """Which columns a table of budgets has, and the units of what is in them."""

    units: words.Units
    device: bool
    timed: bool
    computes: bool

    def size(self, nbytes: int) -> str:
        return words.size(nbytes, self.units)

    def columns(self, rows: Sequence[Document]) -> list[Column]:
        """The budget, what a step does with it, and what to say of it."""
        places = words.decimals(row.get("seconds") or 0.0 for row in rows)

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


def _of_step(title: str, told: Callable[[Document], str]) -> Column:
    return Column(title, lambda row: told(row) if "component" in row else "-", right=True)


def _note(trial: Trial, advice: Advice) -> str:
    if trial.problem is not None:
        return "too small"
    if trial.budget == advice.budget:
        return "enough"
    return "no overlap" if _is_too_narrow(trial, advice) else ""


def _is_too_narrow(trial: Trial, advice: Advice) -> bool:
    """Whether there is no room to read while computing, and a step has to wait for that."""
    is_less_than_enough = trial.budget.nbytes < advice.budget.nbytes
    return trial.problem is None and not trial.overlaps and is_less_than_enough


def _remark_on(
    trials: Iterable[Trial],
    contents: FoundModels,
    source: CheckpointSource,
    advice: Advice,
    look: _Look,
) -> None:
    if source.told:
        remark(f"Read: {source.told}.")
    if contents.pickles:
        remark(f"Left out, as there are only torch pickles of it: {', '.join(contents.pickles)}.")
    for trial in trials:
        if trial.problem is not None:
            remark(f"{trial.problem}. {trial.problem.advice}")
    narrow = [trial for trial in trials if _is_too_narrow(trial, advice)]
    if narrow:
        enough = words.at_least(COMFORTABLE * narrow[-1].cut.largest.nbytes, look.units)
        remark(
            f"--ram {narrow[-1].budget.text} has room for less than {COMFORTABLE} of the largest "
            f"groups: reading and computing will hardly overlap. {enough} would do."
        )
