"""One variant: a config applied to a width and dtypes, with its identity and its launch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.forward import ForwardVariant, make_forward
from generator.kernels.geometry import Config, Geometry
from generator.kernels.knobs import KNOBS
from generator.kernels.strategies import NO_SUMS
from generator.own_files import may_add_early
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.target import WARP
from normforge.spec import UNBOUNDED, KernelSpec

_NAMED_BARRIERS = 15
"""Named barriers of a CTA, one for each team of several warps; barrier 0 is the CTA's."""


@dataclass(frozen=True)
class Variant(Geometry):
    """A geometry with its identity, its launch and its determinism class. Raises NormforgeError for
    what the templates would compile to wrong sums or to a kernel that hangs. (The rules and
    values of a space keep that away, and the rules say more.)"""

    def __post_init__(self) -> None:
        cluster = self.config.get("cluster", 1)
        if self.strategy.adds == "in_turns" and cluster != 1:
            raise NormforgeError(
                f"'{self.strategy}' cannot have a cluster of {cluster}: each CTA draws a ticket of "
                "its own, and those of a cluster need one for all"
            )
        fault = next((said for wrong, said in self._faults() if wrong), None)
        if fault is not None:
            raise NormforgeError(f"no kernel has {fault}: {dict(self.config)} for N = {self.N}")

    def _faults(self) -> Iterator[tuple[bool, str]]:
        """Yield sentences about what no kernel can have, each with True if this one has it."""
        cluster, staged = self["cluster"], self["pipeline"] != "direct"
        waits = self.strategy is not NO_SUMS
        yield waits and not self.sums.column_sums, f"'{self.strategy}' without sums over the rows"
        yield not waits and self.sums.column_sums > 0, "sums over the rows and no strategy"
        unknown = self.run_rows > 0 and not self.strategy.group_fragments
        yield unknown, f"'{self.strategy}' of groups of rows, for which it has no code"
        # CTAs that wait for others wait for ever where those never start.
        yield waits and self["grid"] == "rows", f"'{self.strategy}' and more CTAs than fit at once"
        per_row = self["threads_per_row"]
        yield cluster > 1 and per_row < WARP, "a cluster with rows of less than a warp"
        # Lanes exchange what they have in butterflies, which such rows do not fit.
        uneven = per_row < WARP and WARP % per_row > 0
        needed = f"{per_row} threads for a row, of which lanes need others' columns"
        yield uneven and self.exchanges, needed
        bulk = self["pipeline"] == "bulk"
        yield bulk and self.rows_abreast > 1, f"bulk copies for {self.rows_abreast} rows abreast"
        again = self["reload"] == "smem" or self.run_rows > 0
        yield self.early_sums and again, "early sums, and rows that are read again or in runs"
        unknown = self.early_sums and not may_add_early(self.operation)
        yield unknown, f"early sums of {self.operation}, whose template does not add early"
        alone = per_row < WARP or self.run_rows > 0 or not self.exact
        yield self.producer and alone, "a producer and parts of warps, runs of rows or any N"
        crowded = self.producer and self.teams >= _NAMED_BARRIERS
        yield crowded, f"a producer and {self.teams} teams, which need a barrier each and one more"
        held = self.producer and WARP % self["rows_in_flight"] == 0
        yield self.holds_numbers and not held, "numbers of rows that are held without a producer"
        never = self.groups_ahead > 0 and not (staged and self.signature.groups)
        yield never, "numbers of groups that are asked for ahead of rows that are not"
        yield self.stages_groups and not self.may_stage, "numbers of groups in stages without room"
        # Others take the number of columns of a CTA for a constant, or for that of the whole row.
        any_row = self.teams == 1 and self.elements % 4 == 0 and self["pipeline"] != "bulk"
        any_row &= self.strategy.way == "second_kernel" and not self.run_rows
        any_row &= self.N % (cluster * self.elements) == 0
        yield cluster > 1 and not self.exact and not any_row, "a cluster and any N"
        other = cluster > 1 or self.strategy.way != "second_kernel"
        several = self.sums.column_sums > 1 and not self.exact
        yield several and other, f"'{self.strategy}' of several sums of each column, and any N"
        yield self.exact and self.N % cluster != 0, "CTAs of a cluster with unequal parts of a row"
        yield self.shifted and not self.may_shift, "rows that are no whole vectors"
        block = self.block_columns
        whole = self.exact and self.columns % block == per_row * self.elements % block == 0
        whole &= block <= WARP * self.elements
        yield block > 1 and not whole, f"blocks of {block} columns in parts"
        yield block > 1 and self.elements % 2 > 0, "FP8 in vectors of one element: two are stored"
        ahead = self["stages"] - (self["reload"] == "smem")
        yield staged and ahead < 1, "stages that are all in use while rows are read again"
        in_warps = self.team_threads > WARP
        yield in_warps and self.teams > _NAMED_BARRIERS, "more teams than named barriers"

    def __str__(self) -> str:
        return self.id

    @cached_property
    def source_config(self) -> dict[str, int | str]:
        """The part of the config that the source or the compiler's options depend on: two variants
        equal in it are one cubin."""
        return {
            knob: value
            for knob, value in self.config.items()
            if not KNOBS[knob].launch_only and value != KNOBS[knob].neutral
        }

    @cached_property
    def id(self) -> str:
        """A readable name that is unique to the source, for example
        `column_slices_bulk3_n4096_bf16_128x2_5f0c1a9e`."""
        weight = "" if self.weight_dtype == self.dtype else f"w{self.weight_dtype}_"
        width = f"n{self.N}" if self.exact else f"n{self.least}to{self.N}"
        text = repr((sorted(self.source_config.items()), self.N, self.exact))
        text += "" if self.exact else str(self.least)
        text += self.dtype + self.weight_dtype + "offset" * self.offset + self.residual
        text += self.rotation
        text += "" if self.in_blocks else "row by row"
        family = "" if self.operation == RMSNORM_BACKWARD else f"{self.operation}_"
        text += family
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        stages = self["stages"] if self["pipeline"] != "direct" else ""
        options = "offset_" * self.offset + (f"residual{self.residual}_" if self.residual else "")
        options += f"{self.rotation}_".replace("+", "_") if self.rotation else ""
        return (
            f"{family}{self['strategy']}_{self['pipeline']}{stages}_{width}_{self.dtype}_"
            f"{weight}{options}{self['threads_per_row']}x{self['rows_per_cta']}_{digest}"
        )

    @property
    def determinism(self) -> str:
        return "batch_invariant" if self.run_rows else self.strategy.determinism

    def spec(self, sms: int) -> KernelSpec:
        """The facts that a launch on a GPU of `sms` multiprocessors needs. Raises NormforgeError
        where it has too few of them for rows that are no whole vectors."""
        spec = self._spec(sms)
        if spec.participants < spec.grid_step:
            raise NormforgeError(
                f"{self.id} needs {spec.grid_step} CTAs at once, and {spec.participants} fit"
            )
        return spec

    def _spec(self, sms: int) -> KernelSpec:
        return KernelSpec(
            name=self.id,
            exact=self.exact,
            strategy=self["strategy"],
            determinism=self.determinism,
            threads=self.cta_threads,
            sum_threads=self["sum_threads"],
            smem_bytes=self.smem_bytes,
            vector_bytes=self["vector_bytes"],
            partial_columns=self.partial_columns,
            partial_stride=self.partial_stride,
            slice_columns=self["slice_columns"],
            batch_rows=self.batch_rows,
            rows_per_cta=self["rows_per_cta"],
            cluster=self["cluster"],
            dependent=self["overlap"] == "dependent",
            levels=self["levels"],
            ctas_per_sm=self["ctas_per_sm"],
            even_grid=self["grid"] == "even",
            sms=UNBOUNDED if self["grid"] == "rows" else sms - self["spare_sms"],
            least=self.least_columns,
            run_rows=self.run_rows,
            group_rows=self.group_rows,
            leaves=self["leaves"] if self.run_rows else "",
            producer=self.producer,
            way=self.strategy.way,
            **shape_fields(self),
        )


def shape_fields(problem: Problem | KernelSpec | Geometry) -> dict[str, Any]:
    """The fields of a Geometry that are those of a problem, or of what a kernel was made for."""
    names = ("N", "dtype", "weight_dtype", "offset", "residual", "operation", "rotation")
    return {name: getattr(problem, name) for name in names}


def make_variant(
    config: Config, problem: Problem, *, exact: bool = True, least: int = 1, in_blocks: bool = True
) -> Variant:
    """The variant that serves `problem` with `config` (any M), or with exact False any N from
    `least` to that of the problem. in_blocks: as in Geometry."""
    shape = shape_fields(problem)
    return Variant(dict(config), exact=exact, least=least, in_blocks=in_blocks, **shape)


AnyVariant = Variant | ForwardVariant


def kernel_of(config: Config, problem: Problem) -> AnyVariant:
    """Make the variant of any config: those of RMSNorm's forward have knobs of their own."""
    return (make_forward if "form" in config else make_variant)(config, problem)
