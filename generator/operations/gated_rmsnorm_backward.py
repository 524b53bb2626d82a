"""The backwards of gated RMSNorms, as the tuner knows them."""

from __future__ import annotations

from generator.operations.rows import row_operation
from normforge import operations

GATED_BACKWARDS = tuple(map(row_operation, operations.GATED_BACKWARDS.values()))
