#ifndef NORMFORGE_HOST
// Two numbers in e4m3, rounded to nearest even; beyond 448 they are 448. Needs sm_89.
DEVICE unsigned pack_e4m3(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// The larger one of a number that is not negative and the magnitude of another; NaN if one is.
DEVICE float larger_magnitude(float amax, float value) {
  float larger;
  asm("{\n .reg .f32 magnitude;\n abs.f32 magnitude, %2;\n max.NaN.f32 %0, %1, magnitude;\n}"
      : "=f"(larger) : "f"(amax), "f"(value));
  return larger;
}
DEVICE void store_scale(float* to, float scale) { *to = scale; }
DEVICE void store_scale(unsigned char* to, unsigned scale) {
  *to = static_cast<unsigned char>(scale);
}
#endif
