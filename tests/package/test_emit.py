"""An emitted package: its files, what is kept from the one before, and what is refused."""

from __future__ import annotations

import json
import os
import random
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generator.errors import NormforgeError
from generator.kernels.nvrtc import Compiled
from generator.kernels.render import headers
from generator.kernels.variant import make_variant
from generator.package import cubin_archive, sources
from generator.package.atomic_folder import check_writable
from generator.package.emit import check_package, emit_package
from generator.package.entries import Entry, Forwards, recorded_bits
from generator.package.files import _format_json
from generator.package.sources import source_of
from generator.package.standalone import export_standalone
from generator.problem import Problem
from generator.result import Result
from generator.shape_lists import load_problems
from generator.space.load import load_space, space_file
from generator.target import find_target
from normforge.cubins import CUBINS, CUBINS_INDEX
from normforge.table import FORMAT, FORWARD_TABLE, TABLE, ForwardTable, Table, seal
from tests.support.packages import (
    H200,
    archived_cubins,
    compiled,
    entry,
    fallbacks,
    put,
    snapshot,
    unsealed,
)

# ---- What is written -----------------------------------------------------------------------------


def test_package_holds_source_and_cubin_of_every_winner_and_no_code_but_a_stub(
    package: Path,
) -> None:
    winner = entry("4096x1024:bf16")
    put(package, winner)
    found = snapshot(package)
    (stored,) = Table.load(package).tuned
    assert stored.kernel.read_cubin(package) == winner.compiled.cubin
    source = f"kernels/{winner.variant}.cu"
    assert found[source] == source_of(winner.variant).encode()
    assert len(archived_cubins(package)) == 1 + len(fallbacks())
    # Kernels that were not tuned are there to be run, not to be read.
    assert found.keys() == {source, "__init__.py", TABLE, CUBINS, CUBINS_INDEX}
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_equal_winners_make_equal_packages(package: Path, tmp_path: Path) -> None:
    winners = [entry("4096x1024:bf16"), entry("8192x1024:bf16"), entry("4096x512:bf16")]
    put(package, *winners)
    put(tmp_path / "again", *reversed(winners))
    assert snapshot(package) == snapshot(tmp_path / "again")


def test_shapes_that_share_a_variant_share_its_files(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), entry("8192x1024:bf16"), fallback=[])
    assert len(list((package / "kernels").iterdir())) == 1
    assert len(archived_cubins(package)) == 1


def test_shapes_that_are_not_tuned_again_are_kept(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), entry("8192x1024:bf16"))
    again = entry("4096x1024:bf16", rows_per_cta=4)
    put(package, again, entry("4096x512:bf16"))
    table = Table.load(package)
    assert [t.shape for t in table.tuned] == [
        *("4096x512:bf16", "4096x1024:bf16", "8192x1024:bf16")
    ]
    assert table.tuned[1].kernel.file == again.variant.id
    for kernel in table.kernels():
        assert kernel.read_cubin(package)


def test_kept_winner_keeps_its_own_code_when_the_templates_changed(package: Path) -> None:
    old, new = entry("4096x1024:bf16", text="old"), entry("8192x1024:bf16", text="new")
    put(package, old)
    put(package, new)
    small, large = Table.load(package).tuned
    assert small.kernel.read_cubin(package) == old.compiled.cubin
    assert large.kernel.read_cubin(package) == new.compiled.cubin


def test_kept_winner_of_other_headers_keeps_its_source_which_says_so(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = entry("4096x1024:bf16"), entry("8192x512:bf16")
    put(package, old, fallback=[])
    source = (package / "kernels" / f"{old.variant}.cu").read_text()
    texts = {**headers(), "elements.cuh": "using OfALaterDay = int;\n" + headers()["elements.cuh"]}
    monkeypatch.setattr(sources, "headers", lambda: texts)
    put(package, new, fallback=[])
    assert (package / "kernels" / f"{old.variant}.cu").read_text() == source
    later = (package / "kernels" / f"{new.variant}.cu").read_text()
    assert source.splitlines()[-1].startswith("// Headers: templates/*.cuh, revision ")
    assert later.splitlines()[-1] != source.splitlines()[-1]
    put(package, entry("4096x1024:bf16"), fallback=[])
    again = (package / "kernels" / f"{old.variant}.cu").read_text()
    assert again != source and again.splitlines()[:-1] == source.splitlines()[:-1]


def test_kept_winner_does_not_mind_comments_of_headers(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = entry("4096x1024:bf16")
    put(package, old, fallback=[])
    before = snapshot(package)
    texts = {**headers(), "elements.cuh": "// of a later day\n" + headers()["elements.cuh"]}
    monkeypatch.setattr(sources, "headers", lambda: texts)
    put(package, old, fallback=[])
    assert snapshot(package) == before


@pytest.mark.parametrize("knob", ["weight_in", "arrival", "strategy"])
def test_kept_winner_of_a_config_without_todays_knobs_keeps_its_source(
    package: Path, knob: str
) -> None:
    old = entry("4096x1024:bf16")
    put(package, old, fallback=[])
    source = (package / "kernels" / f"{old.variant}.cu").read_text()
    table = package / "table.json"
    content = json.loads(table.read_text())
    del content["tuned"][0]["kernel"]["config"][knob]
    del content["digest"]
    table.write_text(seal(json.dumps(content, indent=1) + "\n"))
    put(package, entry("8192x512:bf16"), fallback=[])
    assert (package / "kernels" / f"{old.variant}.cu").read_text() == source


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        ("measured", "predicted", True),
        ("measured", "measured", False),
        ("predicted", "measured", False),
        ("predicted", "predicted", False),
    ],
)
def test_predicted_winner_never_replaces_a_measured_one(
    package: Path, before: str, after: str, stays: bool
) -> None:
    old = entry("4096x1024:bf16", before)
    new = entry("4096x1024:bf16", after, rows_per_cta=4)
    put(package, old)
    result = put(package, new)
    (tuned,) = Table.load(package).tuned
    assert tuned.kernel.file == (old if stays else new).variant.id
    assert tuned.evidence == (before if stays else after)
    assert result.refused == ((new.problem,) if stays else ())


def test_shapes_with_another_kernel_or_launch_are_named(package: Path) -> None:
    shapes = ("4096x1024:bf16", "8192x1024:bf16", "4096x512:bf16")
    assert put(package, *map(entry, shapes)).replaced == ()
    assert put(package, *map(entry, shapes)).replaced == ()
    launch = entry(shapes[0], ctas_per_sm=2)
    assert launch.variant.id == entry(shapes[0]).variant.id
    other = entry(shapes[2], rows_per_cta=8)
    assert put(package, launch, entry(shapes[1]), other).replaced == (shapes[2], shapes[0])
    assert put(package, entry(shapes[2], "predicted")).replaced == (), "the measured one stays"


def test_two_runs_that_extend_one_package_lose_nothing(package: Path) -> None:
    shapes = [f"{M}x1024:bf16" for M in (1024, 2048, 4096, 8192, 16384, 32768)]
    threads = [
        threading.Thread(target=put, args=(package, entry(shape)), kwargs={"fallback": []})
        for shape in shapes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tuned.shape for tuned in Table.load(package).tuned] == shapes


# ---- What is refused -----------------------------------------------------------------------------


def test_entries_that_must_not_be_emitted(package: Path) -> None:
    good = entry("4096x1024:bf16")
    loose = entry("4096x1024:bf16", strategy="atomic")
    bare = Entry(good.problem, good.variant, good.compiled, "measured", {"us": 1.0})
    other = Entry(
        *(good.problem, good.variant, compiled(good.variant, arch="sm_100a")),
        *("measured", good.provenance),
    )
    broken = Compiled(H200.arch, "", b"", {}, "13", False, "", "error: expected a ;")
    failed = Entry(good.problem, good.variant, broken, "measured", good.provenance)
    proposed = Entry(good.problem, good.variant, good.compiled, "proposed", good.provenance)
    for bad, sentence in (
        (loose, "not deterministic"),
        (bare, "does not state its"),
        (other, "is for sm_100a and h200 is sm_90a"),
        (failed, "error: expected a ;"),
        (proposed, "evidence 'proposed'"),
    ):
        with pytest.raises(NormforgeError, match=sentence):
            put(package, good, bad)
    assert not package.exists()


@pytest.mark.parametrize(
    "change",
    [
        *({"cluster": 2}, {"threads_per_row": 128}, {"vector_bytes": 8}),
        *({"rows_per_cta": 4}, {"run_rows": 16}, {"group_rows": 256}),
    ],
    ids=str,
)
def test_batch_invariant_kernels_of_a_width_add_in_one_order(
    package: Path, change: dict[str, int]
) -> None:
    """A kernel of another order would change bits with the number of rows. Each width and dtype has
    its own."""
    operation = "rmsnorm_invariant_backward"
    short, long, wide = load_problems(
        "4096x4096:bf16,8192x4096:bf16,8192x4096:bf16:fp32", operation
    )
    config = load_space(space_file(operation)).normalize({"pipeline": "direct"}, short, H200)

    def invariant(problem: Problem, **knobs: int) -> Entry:
        variant = make_variant(config | knobs, problem)
        made = compiled(variant)
        return replace(entry("4096x1024:bf16"), problem=problem, variant=variant, compiled=made)

    put(package, invariant(short), invariant(long), fallback=[])
    for other in (long, wide):
        with pytest.raises(NormforgeError, match=r"dx and dw of 8192x4096.* other bits than those"):
            put(package, invariant(other, **change), fallback=[])
    others = load_problems("8192x2048:bf16,8192x4096:fp16,8192x4096:fp32", operation)
    put(package, *(invariant(other, **change) for other in others), fallback=[])


def test_package_of_another_gpu_is_left_alone(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    before = snapshot(package)
    with pytest.raises(NormforgeError, match="is for h200 and this run for h100"):
        emit_package([], [], find_target("h100"), package)
    assert snapshot(package) == before


@pytest.mark.parametrize("name", ["table.json", CUBINS, CUBINS_INDEX, "kernels"])
def test_damaged_package_is_left_alone(package: Path, name: str) -> None:
    winner = entry("4096x1024:bf16")
    put(package, winner, fallback=[])
    damaged = package / name
    if name == "kernels":
        (damaged / f"{winner.variant}.cu").unlink()
    else:
        damaged.write_text("{")
    before = snapshot(package)
    with pytest.raises(NormforgeError, match="to start a new one"):
        put(package, entry("8192x1024:bf16"))
    assert snapshot(package) == before


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((CUBINS, damage) for damage in ("truncated", "changed", "gone")),
        *((CUBINS_INDEX, damage) for damage in ("truncated", "gone")),
    ],
)
def test_damaged_archive_is_found_before_a_search(package: Path, name: str, damage: str) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    check_package(package, H200)
    damaged = package / name
    content = damaged.read_bytes()
    if damage == "gone":
        damaged.unlink()
    elif damage == "changed":
        middle = len(content) // 2
        damaged.write_bytes(content[:middle] + b"{" + content[middle + 1 :])
    else:
        damaged.write_bytes(content[:-100])
    with pytest.raises(NormforgeError, match=f"{package} are damaged .*{name}.*: restore them"):
        check_package(package, H200)


@pytest.mark.parametrize("damage", ["late stream", "boundary", "no entry", "other kernel"])
def test_damage_of_any_kernel_is_found(
    package: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """xz says nothing of what is wrong behind its first stream."""
    monkeypatch.setattr(cubin_archive, "GROUP_BYTES", 1)
    both = (entry("4096x1024:bf16"), entry("8192x1024:bf16", strategy="last_cta", text="b"))
    put(package, *both, fallback=[])
    check_package(package, H200)
    archive, index = package / CUBINS, json.loads((package / CUBINS_INDEX).read_bytes())
    content = archive.read_bytes()
    offset, size, *_ = index[max(index, key=index.__getitem__)]
    assert offset > 0
    if damage == "late stream":
        middle = offset + size // 2
        archive.write_bytes(content[:middle] + b"{" + content[middle + 1 :])
    elif damage == "boundary":
        archive.write_bytes(content[:offset])
    elif damage == "no entry":
        (package / CUBINS_INDEX).write_text("{}")
    else:
        first, last = index
        (package / CUBINS_INDEX).write_text(json.dumps({first: index[last], last: index[first]}))
    with pytest.raises(NormforgeError, match=f"{package} are damaged .*{CUBINS}.*: restore them"):
        check_package(package, H200)


def test_folder_that_is_not_a_package_is_left_alone(package: Path) -> None:
    package.mkdir(parents=True)
    (package / "thesis.txt").write_text("years of work")
    with pytest.raises(NormforgeError, match="holds no readable package"):
        put(package, entry("4096x1024:bf16"))
    assert (package / "thesis.txt").exists()


def test_unwritable_folders_are_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "rmsnorm_backward"):
        with pytest.raises(NormforgeError, match=f"cannot write {bad}"):
            check_writable(bad)
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(NormforgeError, match="Permission denied"):
            check_writable(tmp_path / "locked" / "rmsnorm_backward")
    check_writable(tmp_path / "new" / "rmsnorm_backward")


@pytest.mark.parametrize("name", [TABLE, FORWARD_TABLE])
def test_table_of_an_older_format_is_one_clear_sentence(package: Path, name: str) -> None:
    forwards = Forwards((), ())
    emit_package([entry("4096x1024:bf16")], [], H200, package, forwards)
    text = unsealed((package / name).read_text())
    (package / name).write_text(text.replace(f'"format": {FORMAT}', '"format": 3'))
    load = Table.load if name == TABLE else ForwardTable.load
    sentence = rf"{name} has format 3, and its runtime reads {FORMAT}; install the package again"
    with pytest.raises(ValueError, match=sentence):
        load(package)
    with pytest.raises(NormforgeError, match=sentence):
        put(package, entry("8192x1024:bf16"), fallback=[])


STRATEGY_BEFORE = {
    "column_slices": ("slices", {}),
    "mailbox": ("flagged_slices", {}),
    "separate": ("second_kernel", {}),
    "last_cta": ("last_cta", {}),
    "semaphore": ("in_turns", {"turns": True}),
    "atomic": ("on_arrival", {"accumulates": True}),
    "none": ("", {}),
}


def of_format_4(kernel: dict[str, Any], strategy: str) -> None:
    """Write a kernel as that format does."""
    spec = kernel["spec"]
    del spec["way"]
    spec["columns"] = spec.pop("partial_columns")
    spec["rows_in_flight"] = spec.pop("batch_rows")
    spec |= {"strategy": strategy, "accumulates": False, "turns": False}
    spec |= STRATEGY_BEFORE[strategy][1]


@pytest.mark.parametrize("strategy", STRATEGY_BEFORE)
def test_table_of_the_format_before_says_the_same(package: Path, strategy: str) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    (today,) = Table.load(package).tuned
    table = json.loads(unsealed((package / TABLE).read_text()))
    of_format_4(table["tuned"][0]["kernel"], strategy)
    (package / TABLE).write_text(json.dumps(table | {"format": 4}))
    (read,) = Table.load(package).tuned
    way = STRATEGY_BEFORE[strategy][0]
    assert read.kernel.spec == replace(today.kernel.spec, strategy=strategy, way=way)


@pytest.mark.parametrize("change", [{"strategy": "relay"}, {"turns": None}])
def test_table_of_the_format_before_without_a_known_way_is_damaged(
    package: Path, change: dict[str, Any]
) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    table = json.loads(unsealed((package / TABLE).read_text()))
    of_format_4(table["tuned"][0]["kernel"], "separate")
    spec = table["tuned"][0]["kernel"]["spec"] | change
    kept = {name: value for name, value in spec.items() if value is not None}
    table["tuned"][0]["kernel"]["spec"] = kept
    (package / TABLE).write_text(json.dumps(table | {"format": 4}))
    with pytest.raises(ValueError, match=r"is damaged \('(relay|turns)'\)"):
        Table.load(package)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 5}', '{"format": 4, "target": 1}'])
def test_damaged_table_says_so(package: Path, text: str) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    for name, load in ((TABLE, Table.load), (FORWARD_TABLE, ForwardTable.load)):
        (package / name).write_text(text)
        with pytest.raises(ValueError, match=rf"{name} is damaged .*; install the package again"):
            load(package)


@pytest.mark.parametrize("instead", ["", '"level": 1, '])
def test_table_without_a_fact_of_a_launch_is_damaged(package: Path, instead: str) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    text = unsealed((package / TABLE).read_text())
    spec = json.dumps(json.loads(text)["tuned"][0]["kernel"]["spec"], sort_keys=True)
    assert spec in text
    (package / TABLE).write_text(text.replace(spec, spec.replace('"levels": 1, ', instead)))
    with pytest.raises(ValueError, match=r"damaged \(the spec of .* has other fields\)"):
        Table.load(package)


def test_every_changed_byte_of_a_table_is_noticed(package: Path) -> None:
    emit_package([entry("4096x1024:bf16")], [], H200, package, Forwards((), ()))
    rng = random.Random(3)
    for name, load in ((TABLE, Table.load), (FORWARD_TABLE, ForwardTable.load)):
        whole = (package / name).read_bytes()
        load(package)
        for place in rng.sample(range(2, len(whole)), min(300, len(whole) - 2)):
            if 3 <= place <= 11:
                continue  # the name of the digest's own field
            damaged = bytearray(whole)
            damaged[place] ^= 1 << rng.randrange(7)
            (package / name).write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{name} (is damaged|has format)"):
                pytest.fail(f"byte {place}: {load(package)}")
        (package / name).write_bytes(whole)


def test_table_with_a_value_that_was_changed_is_one_sentence(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    table = json.loads((package / TABLE).read_text())
    table["tuned"][0]["kernel"]["spec"]["threads"] = "x"
    (package / TABLE).write_text(_format_json(table) + "\n")
    with pytest.raises(NormforgeError, match=r"table\.json is damaged \(its digest") as caught:
        put(package, entry("8192x1024:bf16"), fallback=[])
    assert "\n" not in str(caught.value)


def test_table_without_a_target_is_damaged_whether_or_not_it_has_a_digest(package: Path) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    text = unsealed((package / TABLE).read_text())
    (package / TABLE).write_text(re.sub(r'"target": \{.*?\}', '"target": {}', text, flags=re.S))
    with pytest.raises(NormforgeError, match="its target has other fields"):
        put(package, entry("8192x1024:bf16"), fallback=[])


@pytest.mark.parametrize("field", ["name", "file", "digest"])
@pytest.mark.parametrize("value", ["../../evil", "/tmp/evil", "a/b", "", "."])
def test_names_in_a_foreign_table_are_no_paths(package: Path, field: str, value: str) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    table = json.loads(unsealed((package / TABLE).read_text()))
    kernel = table["tuned"][0]["kernel"]
    (kernel["spec"] if field == "name" else kernel)[field] = value
    (package / TABLE).write_text(json.dumps(table))
    before = set(package.parent.parent.rglob("*"))
    with pytest.raises(NormforgeError, match="cannot be kept"):
        put(package, entry("8192x1024:bf16"), fallback=[])
    assert set(package.parent.parent.rglob("*")) == before


@pytest.mark.parametrize("fact", ["name", "title"])
def test_names_in_a_foreign_table_do_not_become_code(
    package: Path, tmp_path: Path, fact: str
) -> None:
    put(package, entry("4096x1024:bf16"), fallback=[])
    table = json.loads(unsealed((package / TABLE).read_text()))
    table["target"][fact] = 'x"""\nimport evil\n'
    (package / TABLE).write_text(json.dumps(table))
    with pytest.raises(NormforgeError, match=r"import evil.* is no name of a GPU"):
        export_standalone(package, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_winner_without_a_record_of_its_bits_gets_one(package: Path) -> None:
    """A winner with a record keeps it, with its date."""
    known = entry("4096x1024:bf16")

    def recorded(**facts: str) -> dict[str, str]:
        put(package, replace(known, provenance=known.provenance | facts), fallback=[])
        (stored,) = Table.load(package).tuned
        return {name: stored.provenance[name] for name in ("bits", "date")}

    put(package, known, fallback=[])
    assert recorded(bits="b" * 32, date="now") == {"bits": "b" * 32, "date": "now"}
    assert recorded(bits="b" * 32, date="later") == {"bits": "b" * 32, "date": "now"}


def test_only_what_was_run_states_its_bits() -> None:
    assert recorded_bits(Result("ok", extra={"digest": "d", "bits": "b"})) == {"bits": "b"}
    assert recorded_bits(Result("ok", extra={"digest": "d"})) == {}
