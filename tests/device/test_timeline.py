import json

import pytest

from device import Device, Timeline
from device.kernels import add
from device.timeline import merge


def spans_of(events):
    return [(e["pid"], e["tid"], e["name"], e["cat"], e["ts"], e.get("dur")) for e in events if e["ph"] != "M"]


def names_of(events, what):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == what}


def test_a_disabled_timeline_keeps_nothing():
    timeline = Timeline(enabled=False)
    timeline.add("s", "work", "compute", 0.0, 1.0)
    assert timeline.spans == []
    assert timeline.chrome_events() == []


def test_each_track_becomes_a_named_thread_of_a_named_process():
    timeline = Timeline()
    timeline.add("default", "add", "compute", 0.0, 2e-6, args={"flops": 8})
    timeline.add("stream 1", "recv", "communication", 1e-6, 4e-6)
    timeline.add("default", "mark", "event", 2e-6, 2e-6)
    events = timeline.chrome_events(pid=3, process_name="rank 3")
    assert spans_of(events) == [
        (3, 0, "add", "compute", 0.0, 2.0),
        (3, 1, "recv", "communication", 1.0, 3.0),
        (3, 0, "mark", "event", 2.0, None),
    ]
    assert names_of(events, "process_name") == {(3, 0): "rank 3 (virtual time)"}
    assert names_of(events, "thread_name") == {(3, 0): "default", (3, 1): "stream 1"}
    assert next(e for e in events if e["name"] == "add")["args"] == {"flops": 8}
    assert next(e for e in events if e["name"] == "mark")["ph"] == "i"


def test_wall_time_is_a_process_of_its_own_counted_from_the_origin():
    timeline = Timeline(wall_origin_s=100.0)
    timeline.add("default", "add", "compute", 0.0, 1e-6, 100.5, 100.75)
    events = timeline.chrome_events(pid=1, process_name="rank 1")
    assert spans_of(events)[1] == (1_000_001, 0, "add", "compute", 500_000.0, 250_000.0)
    assert names_of(events, "process_name")[1_000_001, 0] == "rank 1 (wall time)"


def test_merging_moves_wall_times_to_the_earliest_origin_and_leaves_virtual_times(tmp_path):
    early, late = Timeline(wall_origin_s=10.0), Timeline(wall_origin_s=12.0)
    early.add("s", "a", "compute", 0.0, 1e-6, 10.0, 11.0)
    late.add("s", "b", "compute", 0.0, 1e-6, 12.0, 13.0)
    late.write(tmp_path / "late.json", pid=1)
    trace = merge([early.chrome_events(pid=0), tmp_path / "late.json"])
    rows = {(pid, name): ts for pid, _, name, _, ts, _ in spans_of(trace["traceEvents"])}
    assert rows == {(0, "a"): 0.0, (1_000_000, "a"): 0.0, (1, "b"): 0.0, (1_000_001, "b"): 2e6}
    again = merge([trace["traceEvents"]])
    assert again == trace, "a merged trace can be merged again"


def test_a_written_file_is_a_chrome_trace_of_what_a_device_did(tmp_path):
    with Device(timeline=Timeline(), progress="inline") as npu:
        x = npu.array([1.0, 2.0])
        npu.launch(add, x, x, out=x)
        assert x.numpy().tolist() == [2.0, 4.0]
        npu.timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    virtual = [row for row in spans_of(trace["traceEvents"]) if row[0] == 0]
    assert [(name, kind) for _, _, name, kind, _, _ in virtual] == [
        ("copy to device", "copy"),
        ("add", "compute"),
        ("copy to host", "copy"),
    ]
    ends = [ts + dur for *_, ts, dur in virtual]
    starts = [ts for *_, ts, _ in virtual]
    assert starts == pytest.approx([0.0, *ends[:-1]], rel=1e-12)


def test_clear_forgets():
    timeline = Timeline()
    timeline.add("s", "a", "wait", 0.0, 1.0)
    timeline.clear()
    assert timeline.spans == []
