// ---- Primitives of the forward alone ----------------------------------------------------------

// 1 / sqrt(value), rounded once. The bits of the approximate instruction may differ between GPUs.
#ifndef NORMFORGE_HOST
DEVICE float reciprocal_root(float value) { return __frsqrt_rn(value); }
DEVICE void store_rstd(float* to, float value) { *to = value; }

// y, which the next operation reads. The priority keeps it in the L2 until then, also where x and y
// together do not fit. residual_out is stored without it: only a later addition reads that.
template <int kBytes> DEVICE void store_y(void* to, const Packet<kBytes>& packet) {
  const unsigned* w = packet.words;
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#define STORE_Y "st.global.L2::cache_hint"
  if constexpr (kBytes == 2) {
    asm volatile(STORE_Y ".u16 [%0], %1, %2;" ::"l"(to), "h"((unsigned short)w[0]), "l"(policy)
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile(STORE_Y ".u32 [%0], %1, %2;" ::"l"(to), "r"(w[0]), "l"(policy) : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile(STORE_Y ".v2.u32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(w[0]), "r"(w[1]), "l"(policy)
                 : "memory");
  } else if constexpr (kBytes == 16) {
    asm volatile(STORE_Y ".v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3]), "l"(policy)
                 : "memory");
  } else {
    asm volatile(STORE_Y ".v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"l"(to), "r"(w[0]),
                 "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(w[4]), "r"(w[5]), "r"(w[6]), "r"(w[7]),
                 "l"(policy)
                 : "memory");
  }
#undef STORE_Y
}
#else
DEVICE float reciprocal_root(float value) {
  return static_cast<float>(1.0L / __builtin_sqrtl(static_cast<long double>(value)));
}
template <int kBytes> DEVICE void store_y(void* to, const Packet<kBytes>& packet, AT_LINE) {
  store_row<kBytes>(to, packet, line);
}
DEVICE void store_rstd(float* to, float value, AT_LINE) {
  normforge::output_write(normforge::kOutputDw, to, 4, line);
  *to = value;
}
#endif
