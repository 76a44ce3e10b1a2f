import math

import pytest

from device import ArgumentError, Cost
from device.spec import SPECS, spec


def test_the_default_chip_is_the_910b3_of_an_eight_card_server():
    chip = spec("ascend910b")
    assert chip is spec("910B") is SPECS["ascend910b3"]
    assert chip.soc_name == "Ascend910B3"
    assert chip.hbm_bytes == 64 << 30


@pytest.mark.parametrize(
    ("name", "tflops"), [("ascend910b1", 363.7), ("ascend910b2", 353.9), ("ascend910b3", 294.9), ("910b4", 245.8)]
)
def test_half_precision_peaks_are_the_published_ones(name, tflops):
    assert spec(name).cube_flop_per_s / 1e12 == pytest.approx(tflops, abs=0.05)


def test_a_kernel_takes_its_launch_and_the_longer_of_computing_and_moving():
    chip = spec("ascend910b")
    assert chip.time_s(Cost(0, 0)) == chip.launch_s
    assert chip.time_s(Cost(0, 1.6e12)) == chip.launch_s + 1.0
    assert chip.time_s(Cost(chip.cube_flop_per_s, 0.8e12, "cube")) == chip.launch_s + 1.0


def test_wider_elements_compute_slower():
    chip = spec("ascend910b")
    cube = [chip.flop_per_s("cube", width) for width in (1, 2, 4, 8)]
    assert [c / cube[1] for c in cube] == [2, 1, 1 / 4, 1 / 16]
    assert chip.flop_per_s("vector", 2) == 40 * 1.8e9 * 128
    assert chip.flop_per_s("vector", 4) == 40 * 1.8e9 * 64


def test_host_copies_pay_latency_and_bytes():
    chip = spec("ascend910b")
    assert chip.host_copy_s(0, True) == chip.host_link_s
    assert math.isclose(chip.host_copy_s(24_000_000_000, True), 1.0 + chip.host_link_s)
    assert chip.host_copy_s(1 << 20, False) < chip.host_copy_s(1 << 20, True)


def test_unknown_chips_and_units_are_refused():
    with pytest.raises(ArgumentError, match="no chip is called 'h100'; known are ascend910b1"):
        spec("h100")
    with pytest.raises(ArgumentError, match="'cube' or 'vector', got 'tensor'"):
        spec("910b").flop_per_s("tensor", 2)
