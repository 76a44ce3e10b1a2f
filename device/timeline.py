"""What happened when, in virtual and in wall time, and how does that become a picture?

A `Timeline` collects spans; `write` makes a file that Perfetto (ui.perfetto.dev) and chrome://tracing open. Every
stream is a track; virtual and wall time are two processes in the picture, because they share no clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Event = dict[str, Any]

KINDS = ("compute", "communication", "wait", "copy", "event")
_WALL_PID = 1_000_000  # added to a pid for its wall-time tracks: more than there are ranks


class Span(NamedTuple):
    """One piece of work on one track. Times are seconds; the wall times are None where nothing was measured."""

    track: str
    name: str
    kind: str
    start_s: float
    end_s: float
    wall_start_s: float | None = None
    wall_end_s: float | None = None
    args: Mapping[str, Any] | None = None


class Timeline:
    """Collect spans, or, when not `enabled`, ignore them at the price of one comparison.

    Args:
        enabled: may be switched at any time.
        wall_origin_s: the `time.perf_counter()` that wall times are counted from; this moment when left out.

    Example:
        >>> timeline = Timeline()
        >>> timeline.add("default", "add", "compute", 0.0, 2e-6)
        >>> [(e["name"], e["ts"], e["dur"]) for e in timeline.chrome_events() if e["ph"] == "X"]
        [('add', 0.0, 2.0)]
    """

    __slots__ = ("_rows", "enabled", "wall_origin_s")

    def __init__(self, enabled: bool = True, wall_origin_s: float | None = None) -> None:
        self.enabled = enabled
        self.wall_origin_s = time.perf_counter() if wall_origin_s is None else wall_origin_s
        self._rows: list[tuple[Any, ...]] = []

    def add(
        self,
        track: Any,
        name: str,
        kind: str,
        start_s: float,
        end_s: float,
        wall_start_s: float | None = None,
        wall_end_s: float | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Note a span.

        Args:
            track: the stream that did the work, or the name of a track.
            name: what to write on it.
            kind: one of `KINDS`; an ``"event"`` is a point.
            start_s, end_s: virtual seconds.
            wall_start_s, wall_end_s: `time.perf_counter()` values.
            args: more to show when the span is selected; plain values.
        """
        if self.enabled:
            self._rows.append((track, name, kind, start_s, end_s, wall_start_s, wall_end_s, args))

    @property
    def spans(self) -> list[Span]:
        """Everything noted so far, in the order in which it was noted."""
        return [Span(_name_of(track), *rest) for track, *rest in list(self._rows)]

    def clear(self) -> None:
        """Forget everything noted so far."""
        self._rows.clear()

    def chrome_events(self, pid: int = 0, process_name: str = "device") -> list[Event]:
        """Return Chrome trace events, `ts` and `dur` in µs: virtual tracks as process `pid`, wall tracks beside it."""
        spans = self.spans
        virtual = [(s, s.start_s, s.end_s) for s in spans]
        wall = [
            (s, s.wall_start_s - self.wall_origin_s, s.wall_end_s - self.wall_origin_s)
            for s in spans
            if s.wall_start_s is not None and s.wall_end_s is not None
        ]
        tracks = {track: tid for tid, track in enumerate(dict.fromkeys(s.track for s in spans))}
        events = _process(pid, f"{process_name} (virtual time)", tracks, {}) if virtual else []
        events += [_event(pid, tracks, *row) for row in virtual]
        if wall:
            origin = {"wall_origin_s": self.wall_origin_s}
            events += _process(pid + _WALL_PID, f"{process_name} (wall time)", tracks, origin)
            events += [_event(pid + _WALL_PID, tracks, *row) for row in wall]
        return events

    def write(self, path: str | os.PathLike[str], pid: int = 0, process_name: str = "device") -> None:
        """Write a trace file of this timeline alone."""
        import json

        with open(path, "w", encoding="utf-8") as file:
            json.dump(merge([self.chrome_events(pid, process_name)]), file)


def merge(parts: Iterable[str | os.PathLike[str] | list[Event]]) -> dict[str, Any]:
    """Join the events of several timelines (trace files, or lists from `chrome_events`) into one trace object.

    Wall times, each counted from its own origin, are moved to the earliest of all; this is right for processes of one
    host, whose `perf_counter` is one clock.
    """
    loaded = [part if isinstance(part, list) else _load(part) for part in parts]
    origins: dict[int, float] = {}
    for events in loaded:
        for event in events:
            if event["ph"] == "M" and "wall_origin_s" in event["args"]:
                origins[event["pid"]] = event["args"]["wall_origin_s"]
    first = min(origins.values(), default=0.0)
    merged: list[Event] = []
    for events in loaded:
        for event in events:
            if event["ph"] != "M" and event["pid"] in origins:
                event = {**event, "ts": event["ts"] + (origins[event["pid"]] - first) * 1e6}
            elif event["ph"] == "M" and "wall_origin_s" in event["args"]:
                event = {**event, "args": {**event["args"], "wall_origin_s": first}}
            merged.append(event)
    return {"traceEvents": merged, "displayTimeUnit": "ns"}


def _process(pid: int, name: str, tracks: dict[str, int], extra: dict[str, Any]) -> list[Event]:
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name, **extra}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]
    for track, tid in tracks.items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return events


def _event(pid: int, tracks: dict[str, int], span: Span, start_s: float, end_s: float) -> Event:
    event: Event = {"name": span.name, "cat": span.kind, "pid": pid, "tid": tracks[span.track], "ts": start_s * 1e6}
    if span.kind == "event":
        event |= {"ph": "i", "s": "t"}
    else:
        event |= {"ph": "X", "dur": (end_s - start_s) * 1e6}
    if span.args:
        event["args"] = dict(span.args)
    return event


def _load(path: str | os.PathLike[str]) -> list[Event]:
    import json

    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    events: list[Event] = trace["traceEvents"] if isinstance(trace, dict) else trace
    return events


def _name_of(track: Any) -> str:
    return track if isinstance(track, str) else str(track.name)
