"""A driver whose kernels quantize norms, for tests without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from normforge.frontends.quantized_node import SERVED
from normforge.operations import RowOperation
from normforge.operations.formula import evaluate
from tests.support.fake_driver import (
    SPEC,
    ComputingDriver,
    FakeDevice,
    at_address,
    entry,
    row_server,
    rows_at,
    stand_in,
    use_row_servers,
)

BF16 = torch.bfloat16


class Device(ComputingDriver):
    """Computes a forward that is quantized from the arguments of its kernel, of rows in bf16."""

    def __init__(self, operation: RowOperation) -> None:
        super().__init__()
        self.operation = operation

    def compute(self, function: str, args: Any) -> None:
        signature = self.operation.signature
        rows = {t.name: torch.stack(rows_at(args, t.name, BF16)) for t in signature.early}
        given = rows | {"weight": at_address(args.weight, args.columns, BF16)}
        numbers = {number.name: getattr(args, number.name) for number in signature.numbers}
        found = evaluate(self.operation, given | numbers, offset=args.weight_offset)
        narrow = {output.name: found[output.name].bfloat16() for output in signature.outputs}
        for name, value in (found | narrow).items():
            if at := getattr(args, name):
                at_address(at, value.numel(), value.dtype).copy_(value.flatten())


def launches_of(
    operation: RowOperation, M: int, N: int, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Let a kernel serve M rows of N columns of a forward, which are CPU tensors. Returns its
    launches."""
    driver = Device(operation)
    stand_in(monkeypatch, driver)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    use_row_servers(monkeypatch, device)
    name = operation.name
    spec = replace(SPEC, operation=name, N=N, strategy="none", way="", partial_columns=0)
    server = row_server(operation, entry(M, spec))
    monkeypatch.setattr(server, "may_serve", lambda x: True)
    monkeypatch.setitem(SERVED("*/quantized")._servers, name, server)  # type: ignore[attr-defined]
    return driver.launches
