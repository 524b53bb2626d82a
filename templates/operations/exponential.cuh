// e^x within two units in the last place; beyond |x| = 87 that of 87 or -87. A NaN stays one. All of it
// are operations that every GPU and the emulator round alike. (Range reduction by Cody and Waite,
// "Software Manual for the Elementary Functions", 1980, and the polynomial of Cephes' expf.)
DEVICE float exponential(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
  const float shifted = __fmaf_rn(x, 1.44269504f, kShift);
  const float n = __fadd_rn(shifted, -kShift);
  const float r = __fmaf_rn(n, 2.12194440e-4f, __fmaf_rn(n, -0.693359375f, x));  // x - n * log(2)
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fmaf_rn(__fmul_rn(r, r), p, __fadd_rn(r, 1.0f));
  // The low bits of `shifted` are n, and those of an exponent stand 23 bits higher.
  return __fmul_rn(p, __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u));
}
