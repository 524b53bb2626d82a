// ---- Scales that are powers of two --------------------------------------------------------------

// The exponent of a block's scale, with a bias of 127, or 255 for NaN. The arithmetic is that of
// quantize_mx in normforge/operations/rmsnorm_quantized.py.
struct BlockScale {
  unsigned value;
  float inverse;

  BlockScale() = default;
  DEVICE explicit BlockScale(float amax) {
    const unsigned exponent = __float_as_uint(amax) >> 23;
    const bool finite = exponent < 255;
    value = finite ? exponent - min(exponent, 8u) : 255u;
    inverse = __uint_as_float(finite ? (254u - value) << 23 : 0x7fffffffu);
  }
  DEVICE float quotient(float y) const { return __fmul_rn(y, inverse); }
};
