"""What makes a copy of a package installable by itself: `pip install ./rmsnorm_backward`."""

from __future__ import annotations

import shutil
from pathlib import Path

from generator.paths import REPOSITORY, RUNTIME, program_version

_PROJECT = """\
# Written by Normforge. `pip install .` in this folder installs it as `{module}`.

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "normforge-{gpu}-{name}"
version = "{version}"
description = "{norm} for {title}"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dependencies = ["torch>=2.9", "cuda-python>=13.0"]

[tool.setuptools]
packages = [
{packages}
]
package-dir = {{ "{module}" = "." }}

[tool.setuptools.package-data]
"*" = ["py.typed", "*.json", "*.xz", "include/**/*", "kernels/*", "*.cpp", "*.h"]
"""


def write_project(folder: Path, module: str, gpu: str, norm: str, title: str) -> None:
    """Write pyproject.toml, the licence and py.typed beside a package's Python files. module: the
    name that it installs under. Raises OSError."""
    # Those of the runtime, not those of the folder, where pip leaves its build.
    parts = [init.parent.relative_to(RUNTIME).parts for init in RUNTIME.rglob("__init__.py")]
    packages = [module, *sorted(".".join((module, RUNTIME.name, *part)) for part in parts)]
    text = _PROJECT.format(
        module=module,
        gpu=gpu,
        name=module.replace("_", "-"),
        version=program_version(),
        norm=norm,
        title=title,
        packages="\n".join(f'    "{name}",' for name in packages),
    )
    (folder / "pyproject.toml").write_text(text)
    (folder / "py.typed").touch()
    shutil.copyfile(REPOSITORY / "LICENSE", folder / "LICENSE")
