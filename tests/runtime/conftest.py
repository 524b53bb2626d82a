"""Fixtures of the tests of the runtime: stand-ins for the driver and the device."""

from __future__ import annotations

import pytest

from tests.support.fake_driver import Calls, FakeDevice, FakeDriver, stand_in


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    stand_in(monkeypatch, fake)
    return fake


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


@pytest.fixture(params=["any", "quick"])
def calls(request: pytest.FixtureRequest, driver: FakeDriver, device: FakeDevice) -> Calls:
    return Calls(driver, device, quick=request.param == "quick")
