// ---- Approximate instructions -------------------------------------------------------------------

// Within an ulp and two, if not subnormal, and 0 where it is; the last bits are those of the hardware. The
// emulator rounds once instead.
#ifndef NORMFORGE_HOST
DEVICE float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float approximate_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
#else
DEVICE float approximate_reciprocal(float value) { return 1.0f / value; }
DEVICE float approximate_exp2(float value) { return __builtin_exp2f(value); }
#endif
