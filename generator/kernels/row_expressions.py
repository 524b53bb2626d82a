"""The forms of row kernels, and what the names of tensors stand for in their templates."""

from __future__ import annotations

from typing import Any, NamedTuple

from normforge.operations.signature import Signature


class Form(NamedTuple):
    """The kind of kernel that a fragment is for, beside a signature. shifted: rows are no whole
    vectors; rotary: so many columns of a row are rotated, 0 for all; interleaved: neighbours are
    pairs; joined: a row is heads of so many columns, 0 for one; halves: in these, a thread has both
    columns of every pair; ahead: batches ahead at which the L2 is asked for what rows of a group
    share, 0 for never; staged: that lies in the stages, beside the rows."""

    producer: bool = False
    shifted: bool = False
    rotary: int = 0
    interleaved: bool = False
    joined: int = 0
    halves: bool = False
    ahead: int = 0
    staged: bool = False


PLAIN = Form()


def expressions(signature: Signature, form: Form) -> dict[str, Any]:
    """Return what the name of every tensor stands for in a kernel: element i of its row u, or the
    number of that row or of the call. `row_sums` and `later_sums` are lists of sums, `results` the
    arrays of the outputs. Of tensors that are read in pairs, `partner` has what stands at the other
    column: with neighbours as pairs, in the same vector."""
    results = {
        output.name: f"out_{output.name}" if i else "out"
        for i, output in enumerate(signature.outputs)
    }
    places = ["u", "kRowsInFlight + u", *(f"{i} * kRowsInFlight + u" for i in range(2, 4))]
    partner: dict[str, str] = {}
    column = "rows.column(j)" + " % kHead" * (form.joined > 0)
    first_half = f"({column} < kHalf)"
    if form.interleaved or form.halves:
        first_half = f"({'i' if form.interleaved else 'j'} % 2 == 0)"
    found: dict[str, Any] = {
        "results": results,
        "partner": partner,
        "first_half": first_half,
        "row_sums": [f"sum[{place}]" for place in places[: signature.row_sums]],
        "later_sums": [f"later_sum[{place}]" for place in places[: signature.later_sums]],
    }
    for tensor in signature.early:
        found[tensor.name] = f"element<Element>({tensor.value}[u][j].words, i)"
    other, beside = ("i ^ 1", "") if form.interleaved else ("i", "partner_")
    for tensor in signature.paired:
        partner[tensor.name] = f"element<Element>({beside}{tensor.value}[u][j].words, {other})"
    for tensor in signature.groups:
        words = f"{tensor.value}[rows.together ? 0 : u][j % kGroupVectors]"
        of_pair = "i / 2" if form.interleaved else "i"
        found[tensor.name] = f"group_number({words}, {of_pair}, rows.wide)"
    for tensor in signature.numbers:
        found[tensor.name] = f"args.{tensor.name}"
    for tensor in signature.statistics:
        found[tensor.name] = f"{tensor.value}[u]"
    if signature.columns:
        found[signature.columns.name] = "weight_of(w, i, args.weight_offset)"
        partner[signature.columns.name] = f"weight_of({beside}w, {other}, args.weight_offset)"
    if signature.added_columns:
        found[signature.added_columns.name] = "element<WeightElement>(added.words, i)"
    for name, array in results.items():
        found[name] = f"{array}[i]"
    for tensor in signature.row_outputs:
        found[tensor.name] = f"out_{tensor.name}"
    if signature.sums:
        vectors = ["j", "kVectors + j", *(f"{i} * kVectors + j" for i in range(2, 8))]
        count = signature.sums.count
        found[signature.sums.name] = [f"partial[{vector}][i]" for vector in vectors[:count]]
    return found
