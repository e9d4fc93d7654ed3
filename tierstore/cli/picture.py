"""The picture of a trace. This imports matplotlib, so it is imported only when one is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tierstore.cli import words
from tierstore.observe.trace import COMPUTE, KINDS, STALLS, Recorded, TraceSlice
from tierstore.observe.trace_writer import write_whole

_COLOURS = {  # told apart by the colour-blind too (Okabe and Ito)
    STALLS: "#d55e00",
    COMPUTE: "#999999",
    "host to device": "#0072b2",
    "device to host": "#56b4e9",
    "disk read": "#009e73",
    "disk write": "#cc79a7",
}
_TIERS = {"DEVICE": "device memory", "HOST": "host memory", "DISK": "disk"}
_BUDGET = "#222222"
_WIDTH = 12.0  # inches, as the heights below
_LEVEL_HEIGHT, _LANE_HEIGHT, _MARGIN = 1.6, 0.3, 1.3
_MOST = 4


def draw(recorded: Recorded, path: str) -> None:
    """Draw bytes on each tier over time, above lanes of what went on. Raises OSError."""
    tiers = [tier for tier in _TIERS if _was_used(recorded, tier)]
    lanes = lanes_of(recorded.slices)
    heights = [*(_LEVEL_HEIGHT for _ in tiers), _LANE_HEIGHT * max(len(lanes), 2)]
    figure = Figure(figsize=(_WIDTH, sum(heights) + _MARGIN), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    figure.suptitle(_title(recorded), fontsize=11)
    for tier, axis in zip(tiers, axes, strict=False):
        _draw_level(axis, recorded, tier)
    _draw_lanes(axes[-1], lanes)
    axes[-1].set_xlabel("seconds since the beginning of the trace")
    axes[-1].set_xlim(0, recorded.seconds or 1)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    write_whole(path, drawn.getvalue())


def _was_used(recorded: Recorded, tier: str) -> bool:
    return any(value for _, value in recorded.counters.get(f"{tier} used", []))


def _title(recorded: Recorded) -> str:
    stats, seconds = recorded.stats, recorded.seconds
    share = stats["stalled_seconds"] / seconds if seconds else 0.0
    return (
        f"tierstore on {recorded.device}: {seconds:.1f} s, of which {share:.1%} stalled; "
        f"{stats['overlap']:.1%} of the transfer time hidden; "
        f"{stats['hits']:,} hit, {stats['late']:,} late, {stats['misses']:,} missed"
    )


def _draw_level(axis: Axes, recorded: Recorded, tier: str) -> None:
    points = recorded.counters[f"{tier} used"]
    times, values = [at for at, _ in points], [value for _, value in points]
    axis.fill_between(times, values, step="post", color="#56b4e9", alpha=0.45, linewidth=0)
    axis.step(times, values, where="post", color="#0072b2", linewidth=1.2, label="used")
    budget, top = recorded.budgets.get(tier), max(values)
    units = words.units_of_tiers(recorded.budgets)
    if budget is not None:
        label = f"budget {words.size(budget, units)}"
        axis.axhline(budget, color=_BUDGET, linewidth=1.2, linestyle="--", label=label)
        top = max(top, budget)
    axis.set_ylim(0, top * 1.08)
    axis.yaxis.set_major_locator(_Rounded(units.value[0]))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.size(value, units)))
    axis.set_ylabel(_TIERS[tier])
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", fontsize=8, ncols=2, framealpha=0.9)


class _Rounded(MaxNLocator):
    """Ticks at round numbers of MB or MiB: those of bytes would be 190.7 MiB apart."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self._base = base

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        unit = self._base ** int(math.log(max(vmax, 1), self._base))
        return [tick * unit for tick in super().tick_values(vmin / unit, vmax / unit)]


def lanes_of(slices: Sequence[TraceSlice]) -> dict[str, list[TraceSlice]]:
    """Slices by track, from top to bottom. Tracks beyond `_MOST` of a kind share the last."""
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


def _draw_lanes(axis: Axes, lanes: dict[str, list[TraceSlice]]) -> None:
    for row, slices in enumerate(lanes.values()):
        # Neighbours in two shades, as what follows each other at once could not be told apart.
        for shade, some in ((1.0, slices[::2]), (0.6, slices[1::2])):
            axis.broken_barh(
                [(one.start, one.seconds) for one in some],
                (row - 0.4, 0.8),
                facecolor=_COLOURS[slices[0].kind],
                alpha=shade,
                linewidth=0,
            )
    axis.set_yticks(range(len(lanes)), list(lanes))
    axis.set_ylim(max(len(lanes), 1) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.25)
    axis.tick_params(axis="y", length=0)
