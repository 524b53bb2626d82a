"""The archive of a package's machine code: what is read is what was written, or an error."""

from __future__ import annotations

import json
import lzma
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.package.cubin_archive import GROUP_BYTES
from generator.package.files import write_cubins
from generator.paths import LIBRARY
from normforge.cubins import CUBINS, CUBINS_INDEX, read_cubin, read_cubins
from tests.support.packages import archived_cubins, digest_of

KERNELS = {
    "rows_n64": b"\x7fELF" + bytes(range(256)) * 9,
    "more_rows_n64": b"",
    "b_rows_n64": b"\x00" * GROUP_BYTES,
    "a" * 200: b"one",
}


def refused(package: Path, name: str = "rows_n64") -> str:
    """Return why a kernel cannot be read."""
    with pytest.raises(RuntimeError, match=r"cannot read .* install the package again") as caught:
        read_cubin(package, name, digest_of(KERNELS["rows_n64"]))
    return str(caught.value)


def test_every_kernel_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_cubins(tmp_path, KERNELS)
    for name, cubin in KERNELS.items():
        assert read_cubin(tmp_path, name, digest_of(cubin)) == cubin
    assert archived_cubins(tmp_path) == KERNELS  # other programs can read the archive


def test_equal_cubins_make_equal_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, kernels in ((first, KERNELS), (second, dict(reversed(KERNELS.items())))):
        folder.mkdir()
        write_cubins(folder, kernels)
    for name in (CUBINS, CUBINS_INDEX):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_neighbours_share_a_stream_that_is_soon_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    kernels = {f"kernel_{i:02}": chance.randbytes(chance.randrange(60_000)) for i in range(40)}
    write_cubins(tmp_path, kernels)
    unpacked: list[int] = []
    unpack = lzma.decompress

    def count(data: bytes) -> bytes:
        unpacked.append(len(unpack(data)))
        return unpack(data)

    monkeypatch.setattr(lzma, "decompress", count)
    for name, cubin in kernels.items():
        assert read_cubin(tmp_path, name, digest_of(cubin)) == cubin
    assert len(unpacked) == len(kernels)
    digests = {name: digest_of(cubin) for name, cubin in kernels.items()}
    del unpacked[:]
    assert read_cubins(tmp_path, digests) == kernels
    headers = 1024 * len(kernels)
    assert GROUP_BYTES / 2 < max(unpacked) < GROUP_BYTES + headers
    streams = {(offset, size) for offset, size, *_ in index_of(tmp_path).values()}
    assert 5 <= len(streams) <= 10  # they hold 1.1 MB
    assert len(unpacked) == len(streams)


def index_of(package: Path) -> dict[str, list[int]]:
    return json.loads((package / CUBINS_INDEX).read_text())


@pytest.mark.parametrize("name", ["rows_n6", "ows_n64", "", "rows_n64.cubin"])
def test_names_that_are_not_there_are_not_found(tmp_path: Path, name: str) -> None:
    write_cubins(tmp_path, KERNELS)
    assert f"KeyError('{name}')" in refused(tmp_path, name)


def test_another_kernel_than_that_of_the_table_is_refused(tmp_path: Path) -> None:
    write_cubins(tmp_path, KERNELS)
    with pytest.raises(RuntimeError, match="is not the kernel of the table"):
        read_cubin(tmp_path, "rows_n64", digest_of(b"two"))


@pytest.mark.parametrize("name", [CUBINS, CUBINS_INDEX])
def test_package_without_an_archive_or_its_index_says_so(tmp_path: Path, name: str) -> None:
    write_cubins(tmp_path, KERNELS)
    (tmp_path / name).unlink()
    assert "No such file" in refused(tmp_path)


@pytest.mark.parametrize(
    "place",
    [None, [], [0, 1, 2], ["0", 1, 2, 3], [-1, 1, 2, 3], [0, 0, 0, 0], [10**30, 1, 0, 1], {}, 0.5],
)
def test_index_that_says_nonsense_is_damaged(tmp_path: Path, place: Any) -> None:
    write_cubins(tmp_path, KERNELS)
    (tmp_path / CUBINS_INDEX).write_text(json.dumps({"rows_n64": place}))
    refused(tmp_path)


@given(data=st.data())
def test_damage_never_gives_another_kernel(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_cubins(folder, KERNELS)
    damaged = folder / data.draw(st.sampled_from([CUBINS, CUBINS_INDEX]))
    content = bytearray(damaged.read_bytes())
    end = data.draw(st.integers(0, len(content)))
    del content[end:]
    for at in data.draw(st.lists(st.integers(0, max(0, end - 1)), max_size=3)) if end else ():
        content[at] = data.draw(st.integers(0, 255))
    damaged.write_bytes(content)
    for name, cubin in KERNELS.items():
        try:
            assert read_cubin(folder, name, digest_of(cubin)) == cubin
        except RuntimeError as error:
            assert "install the package again" in str(error)


def test_python_without_lzma_imports_packages_and_says_what_to_do(tmp_path: Path) -> None:
    write_cubins(tmp_path, KERNELS)
    program = (
        "import sys; from pathlib import Path; sys.modules['_lzma'] = None; import cubins\n"
        f"try: cubins.read_cubin(Path({str(tmp_path)!r}), 'rows_n64', '')\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=LIBRARY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("this Python cannot unpack kernels: it has no module lzma")
    assert "liblzma-dev" in done.stdout and not done.stderr
