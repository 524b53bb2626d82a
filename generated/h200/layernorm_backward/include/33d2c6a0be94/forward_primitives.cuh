// ---- Primitives of the forward alone ----------------------------------------------------------

// 1 / sqrt(value), rounded once. The bits of the approximate instruction may differ between GPUs.
#ifndef NORMFORGE_HOST
DEVICE float reciprocal_root(float value) { return __frsqrt_rn(value); }
DEVICE void store_rstd(float* to, float value) { *to = value; }
#else
DEVICE float reciprocal_root(float value) {
  return static_cast<float>(1.0L / __builtin_sqrtl(static_cast<long double>(value)));
}
DEVICE void store_rstd(float* to, float value, AT_LINE) {
  normforge::output_write(normforge::kOutputDw, to, 4, line);
  *to = value;
}
#endif
