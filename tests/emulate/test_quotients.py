"""Quotients that are rounded to FP8: the code of the kernels for all scales, with the arithmetic of
the emulator."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from generator.emulate.build import HOST, compile_to, find_compiler
from generator.paths import template_named

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

PROGRAM = """
#include <cstdio>
#include <initializer_list>
#include "normforge_host.h"
static int off = 0;  // of the approximate reciprocal, in units in the last place
static float approximate_reciprocal(float x) {
  const float r = 1.0f / x;
  return r > 0.0f && r <= 0x1p126f ? __uint_as_float(__float_as_uint(r) + off) : r;
}
{SCALE}
// Whether two numbers are on the same side of a third, or both are it.
static bool alike(float a, float b, float of) {
  return (a < of) == (b < of) && (a > of) == (b > of);
}
// Tries blocks of all largest magnitudes: quotients beside every number of five bits, between
// those of e4m3.
static void tried(float by, int step, bool powers) {
  long wrong = 0, divided = 0;
  for (unsigned mantissa = 0; mantissa < 1u << 23; mantissa += step) {
    const BlockScale scale(__uint_as_float(0x3f800000u | mantissa) * by, powers);
    divided += scale.divides;
    for (int m = 16; m < 32; ++m) {
      const float middle = m / 16.0f;
      const float y = static_cast<float>(static_cast<double>(scale.value) * middle);
      for (int d = -2; d <= 2; ++d) {
        const float of = __uint_as_float(__float_as_uint(y) + d), exact = of / scale.value;
        wrong += __float_as_uint(scale.divided(of)) != __float_as_uint(exact);
        wrong += !alike(scale.divides ? scale.divided(of) : scale.quotient(of), exact, middle);
      }
    }
  }
  std::printf("%ld %ld\\n", wrong, divided);
}
int main() {
  for (off = -1; off <= 1; ++off) {
    tried(1.0f, {STEP} * (off ? 8 : 1), false);
    tried(0x1p-20f, {STEP} * 64, true);
    tried(0x1p110f, {STEP} * 64, false);
  }
  off = 0;
  const float inf = __builtin_inff(), nan = __builtin_nanf("");
  long found = 0;
  for (float amax : {0.0f, 1.0f, 448.0f, 3e38f, inf, nan})
    for (int powers = 0; powers < 2; ++powers) {
      const BlockScale scale(amax, powers);
      for (float y : {0.0f, -0.0f, 1e-40f, -1e-40f, 1.0f, -3e38f, inf, -inf, nan}) {
        if (y - y == 0.0f && __builtin_fabsf(y) > amax) continue;
        const float exact = y / scale.value;
        const float q = scale.divides ? scale.divided(y) : scale.quotient(y);
        const bool sign = (__float_as_uint(q) ^ __float_as_uint(exact)) >> 31;
        const bool same = exact != exact ? q != q : !sign && __builtin_fabsf(q - exact) <= 1e-4f;
        if (y - y == 0.0f || amax - amax != 0.0f) found += !same;
      }
    }
  std::printf("%ld\\n", found);
}
"""
"""Prints for every try how many quotients were wrong, and how many divisors need a division."""


def outcome(scale: str, folder: Path, step: int = 1) -> list[str]:
    """Compile and run the program with this text of the scale; return its lines. step: of `step`
    magnitudes that it would try, the program tries one."""
    source, program = folder / "quotients.cpp", folder / "quotients"
    source.write_text(PROGRAM.replace("{SCALE}", scale).replace("{STEP}", str(step)))
    compiler = find_compiler()
    assert compiler is not None
    compile_to(compiler, [f"-I{HOST}", str(source)], program)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def text() -> str:
    return template_named("scales_fp32.cuh").read_text(encoding="utf-8")


def test_every_quotient_is_rounded_to_fp8_as_that_of_a_division(tmp_path: Path) -> None:
    *tries, others = outcome(text(), tmp_path)
    assert others == "0"
    assert len(tries) == 9
    for index, line in enumerate(tries):
        wrong, divided = map(int, line.split())
        assert wrong == 0
        assert divided == 2**17 if index % 3 == 2 else divided < 2000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("distance <= 128 && distance != 64", "false"),
        ("__fmul_rn(y, rest)", "0.0f"),
        ("? other : q", "? q : q"),
        ("sign >> 31 ? 1 : -1", "sign >> 31 ? -1 : 1"),
        ("1.0f - 0x1p-22f", "1.0f + 0x1p-22f"),
    ],
)
def test_a_wrong_quotient_is_found(old: str, new: str, tmp_path: Path) -> None:
    source = text()
    assert old in source
    *tries, others = outcome(source.replace(old, new), tmp_path, step=64)
    assert others != "0" or any(not line.startswith("0 ") for line in tries)
