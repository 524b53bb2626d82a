// ---- Scales in fp32 -----------------------------------------------------------------------------

// The largest magnitude of a block times 1 / 448, or the least power of two that is no smaller. The
// arithmetic is that of quantize_1x128 in normforge/operations/rmsnorm_quantized.py.
//
// e4m3 is rounded from the quotient in fp32, so y * inverse + y * rest, rounded to fp32, has to round to the
// same number. (The quotient by a known divisor is that of Brisebarre, Muller and Raina, "Accelerating
// correctly rounded floating-point division when the divisor is known in advance", IEEE TC 2004.)
// - Before it is rounded to fp32, it is off by less than 2^-43 of itself: `inverse` is too small by
//   0 < error < 2^-21.1 of 1 / value, `rest` leaves out error^3, and error, its sum with its square, `rest`
//   and the product with y are rounded, each by at most 2^-24 of something 2^-21.1 as large as the quotient.
// - Numbers that e4m3 rounds differently have the middle of two of its numbers between them, or are it: m, of
//   at most five bits, and so a number of fp32. Hence the two may differ only if a multiple of 1/2 ulp beside
//   m lies between them unrounded, so that y / value is within 2^-43 of m + ulp / 2 or m - ulp / 2, or
//   of those with ulp / 4 below a power of two.
// - y - m * value is a multiple of 2^-4 ulp(value) * ulp(m) * 2^23, as m has five bits. Where it is as close as that
//   to value * ulp(m) / 2, the mantissa of value, an integer of 24 bits, is within 2^6 of a multiple of 2^20.
//   If it is such a multiple, y would have 25 bits or more, so that nothing is that close.
// - The rest of the numbers, large ones, for which `rest` might be subnormal, infinity and NaN, are divided.
// What underflows is 0 in e4m3 all the same. As inverse < 1 / value, rest >= 0, and -0 stays -0.
// tests/emulate/test_quotients.py tries all mantissas.
struct BlockScale {
  float value, inverse, rest;
  bool divides;

  BlockScale() = default;
  DEVICE BlockScale(float amax, bool power_of_two) {
    value = __fmul_rn(larger_magnitude(amax, 1e-10f), 1.0f / 448.0f);
    if (power_of_two && value == value)
      value = __uint_as_float((__float_as_uint(value) + 0x7fffffu) & 0x7f800000u);
    inverse = __fmul_rn(approximate_reciprocal(value), 1.0f - 0x1p-22f);
    const float error = __fmaf_rn(-value, inverse, 1.0f);
    rest = __fmul_rn(inverse, __fmaf_rn(error, error, error));
    const unsigned distance = (__float_as_uint(value) + 64) & 0xfffff;  // but for 64 more
    divides = !(value <= 0x1p90f) || (distance <= 128 && distance != 64);
  }
  DEVICE float quotient(float y) const { return __fmaf_rn(y, inverse, __fmul_rn(y, rest)); }
  DEVICE static float magnitude(float x) { return __uint_as_float(__float_as_uint(x) & 0x7fffffffu); }
  // y / value, rounded to fp32, without a call of a function, which would cost registers.
  DEVICE float divided(float y) const {
    if (!(value < __uint_as_float(0x7f800000u))) return __fmul_rn(y, approximate_reciprocal(value));
    const float by = value > 0x1p90f ? 0x1p-64f : 1.0f, divisor = __fmul_rn(value, by), a = __fmul_rn(y, by);
    const float reciprocal = approximate_reciprocal(divisor);
    float q = __fmul_rn(a, reciprocal);
    q = __fmaf_rn(-__fmaf_rn(q, divisor, -a), reciprocal, q);
    // Now q is next to the quotient. What it and its neighbour on the other side leave is exact.
    const float over = __fmaf_rn(q, divisor, -a);
    const unsigned bits = __float_as_uint(q), sign = bits ^ __float_as_uint(over);
    const float other = __uint_as_float(bits + (sign >> 31 ? 1 : -1));
    return magnitude(__fmaf_rn(other, divisor, -a)) < magnitude(over) ? other : q;
  }
};
