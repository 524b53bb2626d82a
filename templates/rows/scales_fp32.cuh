// ---- Scales in fp32 -----------------------------------------------------------------------------

// The largest magnitude of a block times 1 / 448, or the least power of two that is no smaller. The
// arithmetic is that of quantize_1x128 in normforge/operations/rmsnorm_quantized.py.
struct BlockScale {
  float value, less, more;

  DEVICE BlockScale(float amax, bool power_of_two) {
    value = __fmul_rn(larger_magnitude(amax, 1e-10f), 1.0f / 448.0f);
    if (power_of_two && value == value)
      value = __uint_as_float((__float_as_uint(value) + 0x7fffffu) & 0x7f800000u);
    // y * less and y * more have y / value between them. Rounded to fp32 that is off by up to 2^-24 of it.
    // The inverse, these two and the products are rounded, too: all in all 4 * 2^-24 and terms of the
    // second order, less than the margin of 8 * 2^-24. The inverse of a power of two is exact, and so
    // are its products. What underflows is 0 in e4m3 all the same, as quotients below 2^-11 are.
    const float inverse = __fdiv_rn(1.0f, value), margin = power_of_two ? 0.0f : 0x1p-21f;
    less = __fmul_rn(inverse, 1.0f - margin);
    more = __fmul_rn(inverse, 1.0f + margin);
  }
  DEVICE float quotient(float y) const { return __fdiv_rn(y, value); }
};
