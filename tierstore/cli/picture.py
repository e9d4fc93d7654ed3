"""Draws a trace as a picture. Import it only to draw: it needs matplotlib."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tierstore.model.formatting import printable, size, units_of_tiers
from tierstore.observe.passes import FORWARD
from tierstore.observe.report import acquires
from tierstore.observe.trace import COMPUTE, KINDS, PASSES, PLANS, STALLS, Recorded, TraceSlice
from tierstore.observe.trace_writer import write_whole

_COLOURS = {  # also distinct for colour-blind readers (Okabe and Ito); passes have `_MODELS`
    PLANS: "#f0e442",
    STALLS: "#d55e00",
    COMPUTE: "#999999",
    "host to device": "#0072b2",
    "device to host": "#56b4e9",
    "disk read": "#009e73",
    "disk write": "#cc79a7",
    "download": "#e69f00",
}
_MODELS = ("#c6d4ee", "#f6dfb4", "#cdead0", "#e6cfec", "#f3cfcf", "#d6d6d6")
"""Colours of the passes, one for each model in turn."""
_TIERS = {"DEVICE": "device memory", "HOST": "host memory", "DISK": "disk"}
_BUDGET = "#222222"
_WIDTH = 12.0  # inches, as the heights below
_LEVEL_HEIGHT, _SHARE_HEIGHT, _LANE_HEIGHT, _MARGIN = 1.6, 0.9, 0.3, 1.3
_DPI = 110
_MOST = 4
_NARROWEST = 3.0
"""Least width of a stall or move, in pixels: 20 ms in half a minute would be less than one."""
_BINS = 160
_MOST_LINES = 80
_LETTER = 7.0  # approximate width of a letter in a label, in pixels


def draw(recorded: Recorded, path: str) -> None:
    """Draw the bytes on each tier over time, above lanes of events. Raises OSError."""
    tiers = [tier for tier in _TIERS if _was_used(recorded, tier)]
    lanes = lanes_of(recorded.slices)
    stalls = [one for one in recorded.slices if one.kind == STALLS]
    heights = [_LEVEL_HEIGHT] * len(tiers) + [_SHARE_HEIGHT] * bool(stalls)
    heights.append(_LANE_HEIGHT * max(len(lanes), 2))
    figure = Figure(figsize=(_WIDTH, sum(heights) + _MARGIN), layout="constrained", dpi=_DPI)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    figure.suptitle(_title(recorded), fontsize=11)
    axes[-1].set_xlabel("seconds since the beginning of the trace")
    axes[-1].set_xlim(0, recorded.seconds or 1)
    axes[-1].set_yticks(range(len(lanes)), list(lanes))
    for tier, axis in zip(tiers, axes, strict=False):
        _draw_level(axis, recorded, tier)
    if stalls:
        _draw_shares(axes[len(tiers)], shares_of(stalls, recorded.seconds, _BINS))
    _name_models(figure, recorded.slices)
    figure.draw_without_rendering()  # this fixes the width of a pixel
    _draw_lanes(axes[-1], lanes, (recorded.seconds or 1) / axes[-1].get_window_extent().width)
    _draw_borders(axes, recorded.slices)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    write_whole(path, drawn.getvalue())


def _was_used(recorded: Recorded, tier: str) -> bool:
    return any(value for _, value in recorded.counters.get(f"{tier} used", []))


def _title(recorded: Recorded) -> str:
    stats, seconds = recorded.stats, recorded.seconds
    share = stats["stalled_seconds"] / seconds if seconds else 0.0
    return (
        f"tierstore on {recorded.device}: {seconds:.1f} s, of which {share:.1%} stalled; "
        f"{stats['overlap']:.1%} of the transfer time hidden; "
        f"{acquires(stats['hits'], stats['late'], stats['misses'])}"
    )


def _draw_level(axis: Axes, recorded: Recorded, tier: str) -> None:
    points = recorded.counters[f"{tier} used"]
    times, values = [at for at, _ in points], [value for _, value in points]
    axis.fill_between(times, values, step="post", color="#56b4e9", alpha=0.45, linewidth=0)
    axis.step(times, values, where="post", color="#0072b2", linewidth=1.2, label="used")
    budget, top = recorded.budgets.get(tier), max(values)
    units = units_of_tiers(recorded.budgets)
    if budget is not None:
        label = f"budget {size(budget, units)}"
        axis.axhline(budget, color=_BUDGET, linewidth=1.2, linestyle="--", label=label)
        top = max(top, budget)
    axis.set_ylim(0, top * 1.08)
    axis.yaxis.set_major_locator(_Rounded(units.value[0]))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value, units)))
    axis.set_ylabel(_TIERS[tier])
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", fontsize=8, ncols=2, framealpha=0.9)


class _Rounded(MaxNLocator):
    """Places ticks at round numbers of MB or MiB; round bytes could be 190.7 MiB apart."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self._base = base

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        unit = self._base ** int(math.log(max(vmax, 1), self._base))
        return [tick * unit for tick in super().tick_values(vmin / unit, vmax / unit)]


def lanes_of(slices: Sequence[TraceSlice]) -> dict[str, list[TraceSlice]]:
    """Group slices by track, from top to bottom. Tracks beyond `_MOST` of a kind share the last."""
    lanes: dict[str, list[TraceSlice]] = {}
    for kind in KINDS.values():
        of_kind = [one for one in slices if one.kind == kind]
        tracks = sorted({one.track for one in of_kind}, key=lambda track: (len(track), track))
        for one in of_kind:
            place = min(tracks.index(one.track), _MOST - 1)
            more = "…" if place == _MOST - 1 and len(tracks) > _MOST else ""
            lanes.setdefault(tracks[place] + more, []).append(one)
    order = {kind: place for place, kind in enumerate(KINDS.values())}
    return dict(sorted(lanes.items(), key=lambda lane: (order[lane[1][0].kind], lane[0])))


def shares_of(stalls: Sequence[TraceSlice], seconds: float, bins: int) -> list[float]:
    """Return the fraction of each of `bins` equal intervals during which any caller waited.

    >>> waits = [TraceSlice(STALLS, STALLS, "key", 1.0, 1.5, {})]
    >>> shares_of(waits, 4.0, 4)
    [0.0, 1.0, 0.5, 0.0]
    """
    waited = [0.0] * bins
    width, until = (seconds or 1.0) / bins, 0.0
    for stall in sorted(stalls, key=lambda one: one.start):
        start, end = max(stall.start, until), min(stall.start + stall.seconds, seconds)
        until = max(until, end)  # concurrent waits count once
        for part in range(int(start / width), min(int(end / width) + 1, bins)):
            within = min(end, (part + 1) * width) - max(start, part * width)
            waited[part] += max(within, 0.0)
    return [min(each / width, 1.0) for each in waited]


def _draw_shares(axis: Axes, shares: Sequence[float]) -> None:
    width = axis.get_xlim()[1] / len(shares)
    edges = [i * width for i in range(len(shares) + 1)]
    axis.stairs(shares, edges, fill=True, color=_COLOURS[STALLS])
    axis.set_ylim(0, 1.0)
    axis.set_yticks((0, 0.5, 1), ("0%", "50%", "100%"))
    axis.set_ylabel("stalled")
    axis.set_title(
        f"fraction of each {_time(width)} in which any caller waited", loc="left", fontsize=8, pad=2
    )
    axis.grid(alpha=0.25)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"


def _draw_lanes(axis: Axes, lanes: dict[str, list[TraceSlice]], pixel: float) -> None:
    """Draw slices in rows. `pixel` is the width of a pixel in seconds."""
    colours = _colours_of_models([one for slices in lanes.values() for one in slices])
    for row, slices in enumerate(lanes.values()):
        kind = slices[0].kind
        if kind == PASSES:
            _draw_passes(axis, row, slices, pixel, colours)
            continue
        if kind != COMPUTE:  # below their true width
            widened = [(one.start, max(one.seconds, _NARROWEST * pixel)) for one in slices]
            _draw_bars(axis, row, widened, pale(_COLOURS[kind]), 1.0)
        # Neighbours have two shades, so that adjacent slices can be distinguished.
        for shade, some in ((1.0, slices[::2]), (0.6, slices[1::2])):
            _draw_bars(axis, row, [(s.start, s.seconds) for s in some], _COLOURS[kind], shade)
    axis.set_ylim(max(len(lanes), 1) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.25)
    axis.tick_params(axis="y", length=0)
    if any(slices[0].kind not in (COMPUTE, PASSES) for slices in lanes.values()):
        shortest = _time(_NARROWEST * pixel)
        note = f"stalls, plans and moves under {shortest} are drawn wider; the added width is pale"
        axis.set_title(note, loc="left", fontsize=8, pad=2)


def pale(colour: str) -> str:
    """Return a paler colour (`#rrggbb`), for the added width of short slices."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(0.4 * part + 0.6 * 255):02x}" for part in parts)


def _draw_bars(
    axis: Axes, row: int, bars: Sequence[tuple[float, float]], colour: str, alpha: float
) -> None:
    axis.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, alpha=alpha, linewidth=0)


def _colours_of_models(slices: Sequence[TraceSlice]) -> dict[str, str]:
    """Return a colour for the passes of each model, in the order of their first runs."""
    models = dict.fromkeys(model_of(one) for one in slices if one.kind == PASSES)
    return dict(zip(models, itertools.cycle(_MODELS), strict=False))


def _name_models(figure: Figure, slices: Sequence[TraceSlice]) -> None:
    """Add a legend for the passes, most of which are too short for a label."""
    colours = _colours_of_models(slices)
    if not 0 < len(colours) <= len(_MODELS):
        return
    figure.legend(
        [Patch(color=colour) for colour in colours.values()],
        [_plain(model) for model in colours],
        loc="outside lower left",
        ncols=len(colours) if len(colours) <= 4 else 3,
        fontsize=8,
        title="passes (numbered) of",
        title_fontsize=8,
        alignment="left",
        frameon=False,
    )


def _draw_passes(
    axis: Axes,
    row: int,
    slices: Sequence[TraceSlice],
    pixel: float,
    colours: Mapping[str, str],
) -> None:
    """Draw passes in the colour of their model, with as much of their names as fits."""
    for model, colour in colours.items():
        bars = [(one.start, one.seconds) for one in slices if model_of(one) == model]
        axis.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.5)
    for one in slices:
        number = str(one.args.get("number", ""))
        for label in (f"{short_name(one)} {number}", number):
            if len(label) * _LETTER * pixel < one.seconds:
                middle = one.start + one.seconds / 2
                axis.text(middle, row, _plain(label), ha="center", va="center", fontsize=7)
                break


def _plain(text: str) -> str:
    """Escape text that matplotlib would parse as a formula."""
    return printable(text).replace("$", r"\$")


def model_of(one: TraceSlice) -> str:
    """Return the model of a pass, as in the trace."""
    return str(one.args.get("model", one.name))


def short_name(one: TraceSlice) -> str:
    """Return the label of a pass: its model, without the pipeline."""
    model = model_of(one).rpartition("/")[2]
    does = one.args.get("does", FORWARD)
    return model if does == FORWARD else f"{model} {does}"


def _draw_borders(axes: Iterable[Axes], slices: Sequence[TraceSlice]) -> None:
    """Draw a line through all axes at the start of each pass, unless there are too many."""
    begins = [one.start for one in slices if one.track == PASSES]
    for axis in axes if len(begins) <= _MOST_LINES else ():
        for at in begins:
            axis.axvline(at, color="#555555", linewidth=0.6, alpha=0.5, zorder=0.5)
