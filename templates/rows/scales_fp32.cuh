// ---- Scales in fp32 -----------------------------------------------------------------------------

// The largest magnitude of a block times 1 / 448, or the least power of two that is no smaller. The
// arithmetic is that of quantize_1x128 in normforge/operations/rmsnorm_quantized.py.
struct BlockScale {
  float value, inverse, divisor;

  DEVICE BlockScale(float amax, bool power_of_two) {
    value = __fmul_rn(larger_magnitude(amax, 1e-10f), 1.0f / 448.0f);
    if (power_of_two && value == value)
      value = __uint_as_float((__float_as_uint(value) + 0x7fffffu) & 0x7f800000u);
    inverse = __fdiv_rn(1.0f, value);
    divisor = inverse == 0.0f ? 0.0f : value;  // what is divided by infinity is 0
  }
  // y / value, rounded to nearest even as by a division. Each step takes off what is too much; the first
  // leaves an error below one unit in the last place, and then the second one rounds correctly
  // (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990, 8).
  // No step underflows where it counts: the scale is above 2^-43, and quotients below 2^-11 are 0 in
  // e4m3. A step adds 0 to -0, so that the sign has to be written again.
  DEVICE float quotient(float y) const {
    float q = __fmul_rn(y, inverse);
    q = __fmaf_rn(__fmaf_rn(-divisor, q, y), inverse, q);
    q = __fmaf_rn(__fmaf_rn(-divisor, q, y), inverse, q);
    return __uint_as_float((__float_as_uint(q) & 0x7fffffffu) | (__float_as_uint(y) & 0x80000000u));
  }
};
