"""The tensors that a kernel over rows may read and write, by their roles."""

from __future__ import annotations

import re
from dataclasses import dataclass

ROLES = ("rows", "row", "columns", "sums", "number", "flag", "group", "quantized", "scales")
"""The roles of a tensor: M rows of N elements, one fp32 number for each row, N elements that all
rows share, sums over the rows of every column, one fp32 number that a call is given by value, True
or False, for which there are kernels of their own, N / 2 numbers that the rows of a group share, or
M rows of N elements in FP8 and their scales."""
RESERVED = re.compile(
    "alignas|asm|auto|bool|break|case|char|class|const|continue|default|delete|do|double|"
    "else|enum|extern|false|float|for|goto|if|inline|int|long|namespace|new|operator|private|"
    "public|register|return|self|short|signed|sizeof|static|struct|switch|template|this|"
    "throw|true|try|typedef|typename|union|unsigned|using|virtual|void|volatile|while|"
    "added|added_weights|advance|args|arguments|at|await|batch|batches|blocks|columns?|config|"
    "constants|count|counters|determinism|dw_mode|elements?|empty|exists|fetch|first|first_half|"
    "from|full|gaps|group|group_factor|heads|partner|period|period_factor|together|wide_groups|"
    "wide_numbers|take_batches|[ijuw]|into|kept|knobs|last|later_sums?|launch|left|name|offset|"
    "operation|out|owns|packet|partial|participants?|phase|pipeline|place|produce|rank|read|refill|"
    "release|residuals?|results|rows?|row_sums?|schedule|scratch|signature|slot|smem|source|stage|"
    "start|strategy|sums?|amax|tiles?|turn|valid|weights|weight_offset|zeroed"
)
"""Words of C++, and names that the row kernel gives to other things."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of an operation, or one number; `rows`, `row`, `columns`, `group`, `sums`,
    `number` and their like make them.

    name: by which calls, kernels, checks and reports know it. role: one of ROLES. output: whether
    the kernel writes it. late: of rows, whether they are added to the first output only, behind the
    row sums; they then have a dtype of their own. option: of the problem, without which there is no
    such tensor. copy_of: the output of which this one has the same numbers in the option's dtype.
    count: of sums, how many there are for every column. value: what the kernel calls the numbers
    that it holds. behind: whether the address stands behind all other arguments. note: a comment
    for the kernel's argument. paired: of rows read early and of columns, whether an element needs
    that of the other column of its pair, too: columns i and i + N / 2 are a pair. packed: of an
    output, whether its rows may lie as the heads of a packed tensor. extra: of an output, whether
    it is written for calls alone that ask for it. block: of scales, the columns that share one.
    kind: of what is quantized and of scales, what an element is: e4m3, fp32, or the power of two of
    e8m0. added: of columns, whether they are zeros where a call does without them, and not ones.
    sum_of: of an output, the inputs whose sum it is.
    """

    name: str
    role: str
    output: bool = False
    late: bool = False
    option: str = ""
    copy_of: str = ""
    count: int = 1
    value: str = ""
    behind: bool = False
    note: str = ""
    paired: bool = False
    packed: bool = False
    extra: bool = False
    block: int = 0
    kind: str = ""
    added: bool = False
    sum_of: tuple[str, ...] = ()

    @property
    def cpp(self) -> str:
        """The declaration of the kernel's argument."""
        if self.role in ("quantized", "scales"):
            return f"{'float' if self.kind == 'fp32' else 'unsigned char'}* {self.name};"
        if self.role == "sums":
            return f"void* {self.name};"
        if self.role == "group":
            return f"const void* {self.name};"
        if self.role == "number":
            return f"float {self.name};"
        kind = {"rows": "Element", "row": "float", "columns": "WeightElement"}[self.role]
        kind = "ResidualElement" if self.late or self.copy_of else kind
        return f"{'' if self.output else 'const '}{kind}* {self.name};"


def rows(name: str, note: str = "", paired: bool = False) -> Tensor:
    """M rows of N elements of the problem's dtype, read before the row sums. Their rows may lie at
    any stride, also as the heads of a packed tensor."""
    return Tensor(name, "rows", value=f"{name}s", note=note, paired=paired)


def added_rows(name: str, option: str, note: str = "") -> Tensor:
    """M rows of N elements of the option's dtype, which the kernel adds to its first output."""
    return Tensor(name, "rows", late=True, option=option, note=note)


def row(name: str, value: str = "", behind: bool = False) -> Tensor:
    """One fp32 number for each row, which the forward saved."""
    return Tensor(name, "row", value=value or f"{name}s", behind=behind)


def row_out(name: str, note: str = "null: not wanted") -> Tensor:
    """One fp32 number for each row, which the kernel writes, as what a backward needs."""
    return Tensor(name, "row", output=True, note=note)


def columns(name: str, note: str = "null: ones", paired: bool = False) -> Tensor:
    """N numbers that all rows share, of the problem's weight dtype. Ones without them."""
    return Tensor(name, "columns", note=note, paired=paired)


def added_columns(name: str, note: str = "null: zeros") -> Tensor:
    """Columns of the weight's dtype that are added, such as the bias of a norm. Zeros without
    them; a call's offset is not added to them."""
    return Tensor(name, "columns", note=note, added=True)


def group(name: str, note: str = "") -> Tensor:
    """N / 2 numbers that consecutive rows share, such as the heads of a token: one for each pair of
    columns, i and i + N / 2. They are fp32 or of the problem's dtype, as a call says, which also
    says how many rows share them."""
    return Tensor(name, "group", value=f"{name}_words", note=note)


def number(name: str) -> Tensor:
    """One number of a call, as the eps of a norm: by value, in fp32."""
    return Tensor(name, "number")


def flag(name: str) -> Tensor:
    """True or False, which kernels are compiled for: no argument of them, and an option of the
    problem. False where a call does not say."""
    return Tensor(name, "flag")


def rows_out(
    name: str, note: str = "null: not wanted", packed: bool = False, extra: bool = False
) -> Tensor:
    """M rows of N elements of the problem's dtype, rounded once. They may lie at any stride, and
    `packed` ones also as the heads of a packed tensor. `extra` ones are written for calls alone
    that ask for them."""
    return Tensor(name, "rows", output=True, note=note, packed=packed, extra=extra)


def summed_rows(name: str, *of: str, note: str = "null: not wanted") -> Tensor:
    """The sum of two tensors of rows that are read early, added in fp32 and rounded once. An
    operation's terms are of this sum as it is rounded, and take it in the place of the two."""
    return Tensor(name, "rows", output=True, note=note, sum_of=of)


def quantized(name: str, note: str = "null: not wanted") -> Tensor:
    """The first output of rows in FP8 (e4m3), divided by its scales, one row behind the other."""
    return Tensor(name, "quantized", output=True, note=note, kind="e4m3")


def scales(name: str, block: int, kind: str, note: str = "null: not wanted") -> Tensor:
    """The scales of what is quantized: of each row one for every `block` consecutive columns, of
    which N is a multiple. kind: fp32 or e8m0."""
    return Tensor(name, "scales", output=True, note=note, block=block, kind=kind)


def copied_rows(name: str, of: str, option: str, note: str = "") -> Tensor:
    """The numbers of the output `of` in the option's dtype, where that is another one."""
    return Tensor(name, "rows", output=True, option=option, copy_of=of, note=note)


def sums(name: str, count: int = 1, note: str = "null: not wanted") -> Tensor:
    """Sums over the rows: of every column `count`, the N first ones in front, of the weight's dtype
    or fp32."""
    return Tensor(name, "sums", output=True, count=count, note=note)
