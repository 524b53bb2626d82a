// ---- Primitives of rows in tiles --------------------------------------------------------------

// Triton's `/` and `tl.sqrt`: approximate instructions, whose last bits are those of the hardware. The
// emulator rounds once instead, so it finds the order of the sums but not these bits.
#ifndef NORMFORGE_HOST
DEVICE float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float approximate_root(float value) {
  float result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float approximate_ratio(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#else
DEVICE float approximate_reciprocal(float value) { return 1.0f / value; }
DEVICE float approximate_root(float value) { return __builtin_sqrtf(value); }
DEVICE float approximate_ratio(float a, float b) { return a / b; }
#endif
