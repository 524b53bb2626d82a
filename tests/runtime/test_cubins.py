"""The container of a package's machine code: what is read is what was written, or an error."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.package.files import write_cubins
from generator.runtime.cubins import CUBINS, read_cubin
from tests.support.packages import digest_of

KERNELS = {
    "rows_n64": b"\x7fELF" + bytes(range(256)) * 9,
    "more_rows_n64": b"",
    "b_rows_n64": b"\x00" * 5000,
    "a": b"one",
}
"""Some names end in others."""


def test_every_kernel_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_cubins(tmp_path, KERNELS)
    for name, cubin in KERNELS.items():
        assert read_cubin(tmp_path, name, digest_of(cubin)) == cubin
    with ZipFile(tmp_path / CUBINS) as container:  # what other programs make of it
        assert {n: container.read(f"{n}.cubin") for n in KERNELS} == KERNELS


def test_equal_cubins_make_equal_files(tmp_path: Path) -> None:
    write_cubins(tmp_path, KERNELS)
    first = (tmp_path / CUBINS).read_bytes()
    write_cubins(tmp_path, dict(reversed(KERNELS.items())))
    assert (tmp_path / CUBINS).read_bytes() == first


@pytest.mark.parametrize("name", ["rows_n6", "ows_n64", "", "rows_n64.cubin"])
def test_names_that_are_not_there_are_not_found(tmp_path: Path, name: str) -> None:
    write_cubins(tmp_path, KERNELS)
    with pytest.raises(RuntimeError, match=r"cannot read .* emit it again"):
        read_cubin(tmp_path, name, digest_of(KERNELS["rows_n64"]))


def test_another_kernel_than_that_of_the_table_is_refused(tmp_path: Path) -> None:
    write_cubins(tmp_path, KERNELS)
    with pytest.raises(RuntimeError, match="is not the kernel of the table"):
        read_cubin(tmp_path, "a", digest_of(b"two"))


def test_package_without_a_container_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No such file"):
        read_cubin(tmp_path, "a", digest_of(b"one"))


@given(data=st.data())
def test_damage_never_gives_another_kernel(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_cubins(folder, KERNELS)
    content = bytearray((folder / CUBINS).read_bytes())
    end = data.draw(st.integers(0, len(content)))
    del content[end:]
    for at in data.draw(st.lists(st.integers(0, max(0, end - 1)), max_size=3)) if end else ():
        content[at] = data.draw(st.integers(0, 255))
    (folder / CUBINS).write_bytes(content)
    for name, cubin in KERNELS.items():
        try:
            assert read_cubin(folder, name, digest_of(cubin)) == cubin
        except RuntimeError as error:
            assert "emit" in str(error)
