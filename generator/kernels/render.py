"""One variant to CUDA C++ text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import jinja2

from generator.kernels.variant import Variant
from generator.paths import TEMPLATES
from normforge.spec import CHUNK_ROWS

ELEMENT_TYPE = {"bf16": "bf16", "fp16": "fp16", "fp32": "float"}
_LOAD_HINT = {
    "default": ".nc",
    "no_allocate": ".nc.L1::no_allocate",
    "streaming": ".cs.nc",
    "evict_last": ".nc",  # and a cache policy
}
_PRIORITIES = ("evict_last",)
_STORE_HINT = {"default": "", "streaming": ".cs"}

_COMMENT_OR_LITERAL = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""", re.DOTALL | re.VERBOSE
)


def without_comments(source: str) -> str:
    """CUDA C++ without comments, indentation and empty lines. Literals stay as they are."""

    def kept(match: re.Match[str]) -> str:
        return " " if match[0].startswith("/") else match[0]

    lines = (line.strip() for line in _COMMENT_OR_LITERAL.sub(kept, source).splitlines())
    return "\n".join(line for line in lines if line)


@cache
def _file(name: str, comments: bool) -> str:
    source = (TEMPLATES / name).read_text(encoding="utf-8")
    return source if comments else without_comments(source) + "\n"


def headers() -> dict[str, str]:
    """The static fragments by name, comments included."""
    return {path.name: _file(path.name, True) for path in sorted(TEMPLATES.glob("*.cuh"))}


@cache
def environment(comments: bool = True, include: bool = False) -> jinja2.Environment:
    """Renders the templates, with or without their comments. `source(name)` stands for a static
    fragment, for only the .j2 files are templates: it pastes the text, or with `include` it
    includes the file of that name in this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _file(name, comments)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

    def source(name: str) -> str:
        return f'#include "{name}"' if include else _file(name, comments).rstrip("\n")

    environment.globals["source"] = source
    return environment


def constant_lines(rows: Sequence[tuple[str, int, str]], comments: bool) -> list[str]:
    """`constexpr` lines of (name, value, meaning), a bool's or an int's."""
    return [
        f"constexpr {type(value).__name__} {name} = {str(value).lower()};"
        + (f"  // {meaning}" if meaning and comments else "")
        for name, value, meaning in rows
    ]


def render(variant: Variant, *, comments: bool = True, include: bool = False) -> str:
    """The CUDA C++ source of a variant: its knobs as constants, then the code they choose.
    comments: False leaves out what the compiler does not see. include: whether the static fragments
    are included by their names and not pasted."""
    launch_bounds = ""
    if variant["min_blocks"]:
        launch_bounds = f"__launch_bounds__({variant.threads}, {variant['min_blocks']})"
    shares_any_row = variant["cluster"] > 1 and not variant.exact
    template = environment(comments, include).get_template(f"{variant.operation}.cu.j2")
    return template.render(
        name=variant.id,
        operation=variant.operation,
        sums=variant.sums,
        knobs=variant.config,
        strategy=variant.strategy,
        determinism=variant.determinism,
        constants=_constants(variant, comments),
        row_load=_LOAD_HINT[variant["load_hint"]],
        row_priority=variant["load_hint"] if variant["load_hint"] in _PRIORITIES else "",
        row_store=_STORE_HINT[variant["store_hint"]],
        element=ELEMENT_TYPE[variant.dtype],
        weight=ELEMENT_TYPE[variant.weight_dtype],
        residual=ELEMENT_TYPE[variant.residual] if variant.residual else "",
        offset=variant.offset,
        shares_any_row=shares_any_row,
        in_blocks=bool(variant.block_batches),
        least_columns=0 if shares_any_row else variant.least_columns,
        launch_bounds=launch_bounds,
    )


def _constants(v: Variant, comments: bool) -> list[str]:
    """The knobs and the geometry as `constexpr` lines with their meaning."""
    stage_barriers = v["stages"] if v["pipeline"] == "bulk" else 0
    rows: list[tuple[str, int, str]] = [
        ("kExact", v.exact, "N is a constant"),
        ("kRowColumns", v.N, "N" if v.exact else "largest N served"),
        ("kColumns", v.columns, "columns of one CTA"),
        ("kCluster", v["cluster"], "CTAs that share a row"),
        ("kThreadsPerRow", v["threads_per_row"], ""),
        ("kTeamThreads", v.team_threads, "those of a row, but at least a warp"),
        ("kRowsAbreast", v.rows_abreast, "rows that parts of a warp work on side by side"),
        ("kTeams", v.teams, "of a CTA, each with rows of its own"),
        ("kThreads", v.threads, "of one CTA"),
        ("kRowsInFlight", v["rows_in_flight"], "rows that a thread works on at once"),
        ("kBatchRows", v.batch_rows, "rows of a batch: kRowsInFlight * kRowsAbreast"),
        ("kStages", v["stages"], "batches under way in shared memory"),
        ("kStageBarriers", stage_barriers, "transaction barriers of one team's stages"),
        ("kReload", int(v["reload"] == "smem"), "x and dy are read again for dx"),
        ("kVectorBytes", v["vector_bytes"], ""),
        ("kElements", v.elements, "elements of x in a vector"),
        ("kVectors", v.vectors, "vectors of a row in one thread"),
        ("kWarpsPerRow", v.warps_per_row, ""),
        ("kWeightBytes", v.elements * v.weight_itemsize, "of the weight for one vector of x"),
        ("kRowBytes", v.row_bytes, "of one CTA's part of a row of x"),
        ("kOffset", int(v.offset), "a number is added to the weight"),
        ("kResidual", int(bool(v.residual)), "the residual's gradient is added to dx"),
        ("kResidualBytes", v.elements * (v.residual_itemsize or v.itemsize), "beside a vector"),
        ("kResidualRowBytes", v.residual_row_bytes, ""),
        ("kPartialStride", v.partial_stride, "floats of one row of partial dw"),
        ("kTailColumns", v.tail_columns, "columns of dw that a CTA of the tail sums at once"),
        ("kLevels", v["levels"], ""),
        ("kSumThreads", v["sum_threads"], "of one CTA of the second kernel"),
        ("kSumsOffset", v.sums_offset, "bytes into shared memory"),
        ("kWeightOffset", v.weight_offset, "bytes into shared memory; not args.weight_offset"),
        ("kBroadcastOffset", v.broadcast_offset, ""),
        ("kTilesOffset", v.tiles_offset, ""),
    ]
    if v.block_batches:
        rows.append(("kBlockBatches", v.block_batches, "batches that are added up at once"))
        rows.append(("kBlockSumsOffset", v.block_sums_offset, ""))
    if v.run_rows:
        rows += [
            ("kRunRows", v.run_rows, "that a CTA adds up at once"),
            ("kGroupRows", v.group_rows, "whose runs are added one after another"),
            ("kChunkRows", CHUNK_ROWS, "whose groups are added in pairs"),
            ("kBlockSumsOffset", v.block_sums_offset, ""),
            ("kRunsWrittenOffset", v.runs_written_offset, ""),
        ]
    return constant_lines(rows, comments)
