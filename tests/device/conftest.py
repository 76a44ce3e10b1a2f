"""Devices for the tests: the strictest there is, and one of each kind."""

import pytest

from device import Device


@pytest.fixture
def npu():
    """A device that poisons memory and starts nothing before somebody waits."""
    with Device(check="strict") as device:
        yield device


@pytest.fixture(params=["default", "strict", "off"])
def any_npu(request):
    with Device(check=request.param) as device:
        yield device
