import json
import os
import subprocess
import sys

import pytest

from device.errors import ArgumentError, ClosedError, DeviceError
from device.memory import Segment

MEMFD = hasattr(os, "memfd_create")


@pytest.fixture(params=["anonymous", "named"])
def segment(request, monkeypatch, tmp_path):
    """A segment of each kind; the named one is what systems without memfd_create get."""
    if request.param == "named":
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elif not MEMFD:
        pytest.skip("this system has no memfd_create")
    with Segment.create(1 << 20, "test") as made:
        yield made


def test_a_new_segment_is_zero_and_both_views_show_the_same_bytes(segment):
    assert segment.nbytes == 1 << 20
    assert not segment.array[:4096].any()
    segment.array[3] = 7
    assert segment.buffer[3] == 7
    assert segment.buffer.format == "B"


def test_another_process_maps_it_by_its_descriptor(segment):
    code = (
        "import json, sys; from device.memory import Segment;"
        "s = Segment.attach(json.loads(sys.argv[1])); s.array[5] = s.array[4] + 1; print(s.owner)"
    )
    segment.array[4] = 41
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(segment.descriptor())], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    assert segment.array[5] == 42


def test_the_same_process_can_map_it_twice_and_each_mapping_closes_alone(segment):
    other = Segment.attach(segment.descriptor())
    segment.array[9] = 1
    assert other.array[9] == 1
    other.close()
    assert segment.array[9] == 1


def test_discard_gives_whole_pages_back_and_keeps_the_rest(segment):
    segment.array[:] = 1
    segment.discard(100, 3 * 4096)
    assert segment.array[99] == 1
    assert segment.array[4095] == 1
    assert segment.array[100 + 3 * 4096] == 1
    if MEMFD:
        assert not segment.array[4096 : 3 * 4096].any()


def test_close_tolerates_views_that_are_still_in_use(segment):
    view = segment.array[:16]
    view[0] = 3
    segment.close()
    segment.close()
    assert view[0] == 3
    assert segment.closed
    with pytest.raises(ClosedError, match="segment is closed"):
        _ = segment.array


@pytest.mark.skipif(not MEMFD, reason="needs memfd_create")
def test_a_segment_is_sparse_and_leaves_no_file():
    with Segment.create(1 << 36, "sparse") as big:
        assert os.fstat(big.descriptor()["fd"]).st_blocks == 0
        assert big.descriptor()["path"] is None


def test_unlink_removes_the_name_and_the_mapping_stays(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Segment.create(4096) as made:
        other = Segment.attach(made.descriptor())
        other.unlink()  # not the owner: nothing happens
        assert os.listdir(tmp_path) != []
        made.unlink()
        assert os.listdir(tmp_path) == []
        made.array[0] = 5
        assert other.array[0] == 5
        other.close()


@pytest.mark.skipif(not MEMFD, reason="needs memfd_create")
def test_attaching_to_something_gone_says_so():
    made = Segment.create(4096)
    descriptor = made.descriptor()
    made.close()
    with pytest.raises(DeviceError, match=rf"cannot reach the memory of process {os.getpid()}: No such file"):
        Segment.attach(descriptor)
    with open(os.devnull) as reused, pytest.raises(DeviceError, match="has closed the memory that it offered"):
        Segment.attach({**descriptor, "fd": reused.fileno()})


def test_an_empty_segment_is_refused():
    with pytest.raises(ArgumentError, match="at least one byte, got 0"):
        Segment.create(0)
