"""The kernel that docs/generated-code.md shows is one of the package that the page names."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from generator.kernels.nvrtc import nvrtc_version
from generator.paths import GENERATED, REPOSITORY
from normforge.table import Table

PAGE = (REPOSITORY / "docs" / "generated-code.md").read_text(encoding="utf-8")
(NAME,) = set(re.findall(r"column_slices_\w+_[0-9a-f]{8}", PAGE))
PACKAGE = GENERATED / "gb200" / "rmsnorm_backward"


def block(language: str, containing: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(next(text for text in found if containing in text))


def test_it_is_the_winner_that_the_page_says() -> None:
    table = Table.load(PACKAGE)
    assert table is not None
    (entry,) = (e for e in table.tuned if e.kernel.file == NAME)
    assert (entry.M, entry.N, entry.dtype, entry.weight_dtype) == (4096, 4096, "bf16", "bf16")
    said = json.loads(f"{{{block('json', NAME).replace(', …', '')}}}")["kernel"]
    assert said["digest"] == entry.kernel.digest and said["nvrtc"] == entry.kernel.nvrtc
    config, spec = entry.kernel.config, entry.kernel.spec
    assert said["config"].items() <= config.items()
    assert {name: getattr(spec, name) for name in said["spec"]} == said["spec"]
    places = re.findall(r"generated/(\w+)/rmsnorm_backward/(?:kernels|cubins)", PAGE)
    assert set(places) == {"gb200"}


def test_its_listing_has_the_lines_of_its_source_in_their_order() -> None:
    source, at = (PACKAGE / "kernels" / f"{NAME}.cu").read_text(encoding="utf-8"), 0
    for line in block("cuda", NAME).splitlines():
        if line.strip() not in ("", "…"):
            found = source.find(line.strip(), at)
            assert found >= 0, line
            at = found + len(line.strip())


def test_the_example_compiles_it_to_its_machine_code() -> None:
    code = block("python", NAME)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if nvrtc_version() == "13.0":
        assert done.stdout.strip() in block("json", NAME)
