"""Renders one variant as CUDA C++ text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import jinja2

from generator.kernels.forward import TILE_FORMS, ForwardVariant
from generator.kernels.row_expressions import PLAIN, Form, expressions
from generator.kernels.variant import Variant
from generator.own_files import template_of
from generator.paths import TEMPLATES, template_named
from generator.problem import ITEMSIZE, RMSNORM_BACKWARD
from normforge.operations import Signature, signature_of
from normforge.spec import CHUNK_ROWS

ELEMENT_TYPE = {"bf16": "bf16", "fp16": "fp16", "fp32": "float"}
_LOAD_HINT = {
    "default": ".nc",
    "no_allocate": ".nc.L1::no_allocate",
    "streaming": ".cs.nc",
    "evict_last": ".nc",  # and a cache policy
}
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
    of_operation = name.endswith(".cu.j2")
    path = template_of(name.removesuffix(".cu.j2")) if of_operation else template_named(name)
    source = path.read_text(encoding="utf-8")
    return source if comments else without_comments(source) + "\n"


@cache
def headers() -> dict[str, str]:
    """The fragments that kernels include, by name, comments included: those that are no templates,
    and the others as the kernels of RMSNorm have them."""
    names = sorted(path.name.removesuffix(".j2") for path in TEMPLATES.rglob("*.cuh*"))
    return {name: _fragment(name, True, signature_of(RMSNORM_BACKWARD)) for name in names}


@cache
def _fragment(name: str, comments: bool, signature: Signature, form: Form = PLAIN) -> str:
    """A fragment by name: the file, or what its template is for a signature and a form."""
    if not template_named(f"{name}.j2").exists():
        return _file(name, comments)
    template = environment(comments).get_template(f"{name}.j2")
    return template.render(signature=signature, **form._asdict())


@cache
def environment(comments: bool = True) -> jinja2.Environment:
    """Renders the templates, with or without their comments. In them `line(n)` begins a line that
    is indented by n spaces."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _file(name, comments)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["comments"] = comments
    made.globals["line"] = lambda indent: "\n" + " " * (indent if comments else 0)
    return made


def source_of(
    comments: bool, include: bool, signature: Signature | None = None, form: Form = PLAIN
) -> Callable[[str], str]:
    """Return the function that templates call as `source`: it takes a fragment's name, and pastes
    the text. With `include` it includes the file of that name instead, where that has the same
    text."""
    of_kernel = signature or signature_of(RMSNORM_BACKWARD)

    def source(name: str) -> str:
        if include and _fragment(name, True, of_kernel, form) == headers()[name]:
            return f'#include "{name}"'
        return _fragment(name, comments, of_kernel, form).rstrip("\n")

    return source


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
        launch_bounds = f"__launch_bounds__({variant.cta_threads}, {variant['min_blocks']})"
    shares_any_row = variant["cluster"] > 1 and not variant.exact
    signature = variant.signature
    part = 0 if variant.rotated == variant.N else variant.rotated
    joined, rotary = (part, 0) if variant.joined else (0, part)
    form = Form(
        variant.producer,
        variant.shifted,
        rotary,
        variant.interleaved,
        joined,
        variant.halves,
        variant.groups_ahead,
        variant.stages_groups,
    )
    template = environment(comments).get_template(f"{variant.operation}.cu.j2")
    return template.render(
        **expressions(signature, form),
        source=source_of(comments, include, signature, form),
        **form._asdict(),
        rotates="is_rotated(j, rows.column(j)) ? " if rotary else "",
        holds_numbers=variant.holds_numbers,
        early_sums=variant.early_sums,
        signature=signature,
        name=variant.id,
        operation=variant.operation,
        knobs=variant.config,
        strategy=variant.strategy,
        determinism=variant.determinism,
        constants=_constants(variant, comments),
        row_load=_LOAD_HINT[variant["load_hint"]],
        row_priority="evict_last" if variant["load_hint"] == "evict_last" else "",
        row_store=_STORE_HINT[variant["store_hint"]],
        element=ELEMENT_TYPE[variant.dtype],
        weight_element=ELEMENT_TYPE[variant.weight_dtype],
        residual_element=ELEMENT_TYPE[variant.residual or variant.dtype],
        residual=bool(variant.residual),
        offset=variant.offset,
        shares_any_row=shares_any_row,
        in_blocks=bool(variant.block_batches),
        least_columns=0 if shares_any_row else variant.least_columns,
        launch_bounds=launch_bounds,
    )


def _constants(v: Variant, comments: bool) -> list[str]:
    """The knobs and the geometry as `constexpr` lines with their meaning."""
    stage_barriers = v.stage_barriers
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
    if v.shifted:
        rows.append(("kStageRowBytes", v.stage_row_bytes, "of the vectors that a row touches"))
    if v.signature.scales:
        rows.append(("kBlockColumns", v.block_columns, "columns that share a scale"))
        rows.append(("kBlockVectors", v.block_vectors, "vectors of a thread that do"))
        rows.append(("kBlockLanes", v.block_lanes, "threads that do"))
    if v.halves:
        rows.append(("kBlockColumns", v.rotated, "of a head"))
        rows.append(("kBlockVectors", 2, "of a head that a thread has"))
        rows.append(("kBlockLanes", v.half_lanes, "threads that have some of a head"))
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


def render_forward(variant: ForwardVariant, *, comments: bool = True, include: bool = False) -> str:
    """The CUDA C++ source of a variant. comments, include: as of `render`."""
    v = variant
    tiles = v.form in TILE_FORMS
    rows: list[tuple[str, int, str]] = [
        ("kExact", v.exact, "N is a constant"),
        ("kWalks", v.ctas_per_sm > 0, "CTAs walk over the rows"),
        ("kOffset", not tiles, "a number, added in fp32, comes with every call"),
        ("kRowColumns", v.N, "N" if v.exact else "largest N served"),
        ("kColumns", v.columns, "columns of one CTA"),
        ("kCluster", v.cluster, "CTAs that share a row"),
        ("kThreadsPerRow", v.threads_per_row, ""),
        ("kTeams", v.rows_per_cta, "rows that a CTA works on, each by a team of its own"),
        ("kThreads", v.threads, "of one CTA"),
        ("kRowsInFlight", v.rows_in_flight, "rows that a thread works on at once"),
        ("kVectorBytes", v.vector_bytes, ""),
        ("kElements", v.elements, "elements of x in a vector"),
        ("kVectors", v.vectors, "vectors of a row in one thread"),
        ("kWarpsPerRow", v.warps_per_row, ""),
        ("kWeightBytes", v.elements * ITEMSIZE[v.weight_dtype], "of the weight for one vector"),
        ("kResidualBytes", v.vector_bytes, "of the residual for one vector"),
        ("kStageBarriers", 0, ""),
        ("kSumsOffset", v.sums_offset, "bytes into shared memory"),
    ]
    template = environment(comments).get_template("rmsnorm_forward.cu.j2")
    return template.render(
        source=source_of(comments, include),
        name=v.id,
        constants=constant_lines(rows, comments),
        element=ELEMENT_TYPE[v.dtype],
        weight=ELEMENT_TYPE[v.weight_dtype],
        cluster=v.cluster,
        form=v.form,
        tiles=tiles,
    )
