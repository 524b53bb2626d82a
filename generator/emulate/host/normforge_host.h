// CUDA's vocabulary and the host twins of templates/primitives.cuh: with NORMFORGE_HOST defined,
// the rendered source includes this file in place of that one and compiles as plain C++17.
//
// Arithmetic is IEEE fp32 rounded once per operation on both sides (contraction is off in both
// builds), so a kernel gives the same bits here as on a GPU.
#pragma once

#include "host_api.h"

using namespace normforge;

// -- Vocabulary --

#define __global__
#define __launch_bounds__(...)
#define DEVICE inline __attribute__((always_inline))
#define ARGUMENTS(type, name) const type& name

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
inline int min(int a, int b) { return b < a ? b : a; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline float __uint_as_float(unsigned bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) {
  float result = __builtin_fmaf(a, b, c);
  // g++ would make c - a * b of -(a * b - c), where 0 has another sign.
#if defined(__x86_64__)
  asm("" : "+x"(result));
#elif defined(__aarch64__)
  asm("" : "+w"(result));
#endif
  return result;
}
inline float __frsqrt_rn(float a) {
  return static_cast<float>(1.0L / __builtin_sqrtl(static_cast<long double>(a)));
}

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
template <typename T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

template <int kBytes> struct Packet { unsigned words[(kBytes + 3) / 4]; };

// -- Numbers: to nearest even; NaNs become the one that the GPU's conversions give. --

inline float widen_fp16(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // The exponent's bias differs by 112; a multiplication moves it and is exact for subnormals, too.
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * 0x1p112f));
}
inline unsigned short narrow_bf16(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline unsigned short narrow_fp16(float value) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
  unsigned rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fff;
  if (rest >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);  // rounds past 65504
  if (rest < 0x38800000u)  // subnormal: adding 0.5 puts the unit of rounding where it belongs
    rest = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u;
  else
    rest = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13;
  return static_cast<unsigned short>(sign | rest);
}
inline unsigned narrow_e4m3(float value) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
  unsigned rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fu;
  if (rest >= 0x43e00000u) return sign | 0x7eu;  // at least 448, the largest
  if (rest < 0x3c800000u)  // subnormal, as above
    rest = __float_as_uint(__uint_as_float(rest) + 0x1p14f) - 0x46800000u;
  else
    rest = (rest - 0x3c000000u + 0x7ffffu + (rest >> 20 & 1)) >> 20;
  return sign | rest;
}
inline unsigned pack_e4m3(float low, float high) {
  return narrow_e4m3(low) | narrow_e4m3(high) << 8;
}
inline float larger_magnitude(float amax, float value) {
  const float magnitude = __builtin_fabsf(value);
  return amax > magnitude || amax != amax ? amax : magnitude;
}
inline unsigned pack_bf16(float low, float high) {
  return narrow_bf16(low) | static_cast<unsigned>(narrow_bf16(high)) << 16;
}
inline unsigned pack_fp16(float low, float high) {
  return narrow_fp16(low) | static_cast<unsigned>(narrow_fp16(high)) << 16;
}

// -- Global memory --

template <int kBytes> DEVICE Packet<kBytes> read_packet(const void* from) {
  Packet<kBytes> packet{};
  __builtin_memcpy(packet.words, from, kBytes);
  return packet;
}
template <int kBytes> DEVICE Packet<kBytes> load_row(const void* from, AT_LINE) {
  input_read(kInputRows, from, kBytes, line);
  return read_packet<kBytes>(from);
}
template <int kBytes> DEVICE Packet<kBytes> load_weight(const void* from, AT_LINE) {
  input_read(kInputColumns, from, kBytes, line);
  return read_packet<kBytes>(from);
}
DEVICE void prefetch_l2(const void* from, AT_LINE) { input_read(kInputColumns, from, 1, line); }
DEVICE float load_rstd(const float* from, AT_LINE) {
  input_read(kInputRow, from, 4, line);
  return *from;
}
template <int kBytes> DEVICE void store_row(void* to, const Packet<kBytes>& packet, AT_LINE) {
  output_write(kOutputRows, to, kBytes, line);
  __builtin_memcpy(to, packet.words, kBytes);
}
template <typename T> DEVICE void store_dw(T* to, float value, AT_LINE) {
  output_write(kOutputDw, to, sizeof(T), line);
  if constexpr (sizeof(T) == 4) *to = value;
  else to->bits = is_bf16<T> ? narrow_bf16(value) : narrow_fp16(value);
}
DEVICE void store_scale(float* to, float scale, AT_LINE) {
  output_write(kOutputDw, to, 4, line);
  *to = scale;
}
DEVICE void store_scale(unsigned char* to, unsigned scale, AT_LINE) {
  output_write(kOutputDw, to, 1, line);
  *to = static_cast<unsigned char>(scale);
}
DEVICE float load_dw(const float* from, AT_LINE) {
  output_read(from, 4, line);
  return *from;
}
DEVICE float4 load_workspace(const float* from, AT_LINE) {
  workspace_read(from, 4, line);
  return *reinterpret_cast<const float4*>(from);
}
DEVICE void store_workspace(float* to, float4 v, AT_LINE) {
  workspace_write(to, 4, line);
  *reinterpret_cast<float4*>(to) = v;
}
DEVICE void store_workspace_word(float* to, float value, AT_LINE) {
  workspace_write(to, 1, line);
  *to = value;
}
DEVICE void add_workspace(float* to, float4 v, AT_LINE) { workspace_add(to, &v.x, 4, line); }
DEVICE void send_words(float* to, float4 v, AT_LINE) { mail_send(to, &v.x, line); }
DEVICE float4 receive_words(const float* from, AT_LINE) {
  float4 v;
  mail_receive(from, &v.x, line);
  return v;
}
DEVICE void empty_words(float* at, AT_LINE) { mail_empty(at, line); }

// -- Counters --

DEVICE unsigned load_acquire(const unsigned* at, AT_LINE) { return counter_load(at, true, line); }
DEVICE unsigned load_relaxed(const unsigned* at, AT_LINE) { return counter_load(at, false, line); }
DEVICE void store_release(unsigned* counter, unsigned value, AT_LINE) {
  counter_store(counter, value, true, line);
}
DEVICE void store_relaxed(unsigned* counter, unsigned value, AT_LINE) {
  counter_store(counter, value, false, line);
}
DEVICE unsigned take_ticket(unsigned* counter, AT_LINE) { return counter_add_one(counter, line); }

using Ledger = unsigned long long;
DEVICE Ledger read_acquire(const Ledger* at, AT_LINE) { return ledger_read(at, true, line); }
DEVICE Ledger read_relaxed(const Ledger* at, AT_LINE) { return ledger_read(at, false, line); }
DEVICE void book_relaxed(Ledger* at, Ledger entry, AT_LINE) { ledger_add(at, entry, false, line); }
DEVICE Ledger book_in_order(Ledger* ledger, Ledger entry, AT_LINE) {
  return ledger_add(ledger, entry, true, line);
}
DEVICE Ledger book_and_read(Ledger* ledger, Ledger entry, AT_LINE) {
  return ledger_add(ledger, entry, false, line);
}
DEVICE Ledger book_and_read_later(Ledger* ledger, Ledger entry, AT_LINE) {
  return ledger_add(ledger, entry, false, line);
}

// -- Shared memory --

#define DYNAMIC_SHARED(name) unsigned char* const name = dynamic_shared()
#define STATIC_SHARED(type, name, count) \
  type* const name = static_cast<type*>(static_shared((count) * sizeof(type)))

template <typename T> DEVICE T shared_get(const void* from, int line) {
  shared_read(from, sizeof(T), line);
  return *static_cast<const T*>(from);
}
template <typename T> DEVICE void shared_put(void* to, T value, int line) {
  shared_write(to, sizeof(T), line);
  *static_cast<T*>(to) = value;
}
DEVICE float load_shared(const float* from, AT_LINE) { return shared_get<float>(from, line); }
DEVICE float4 load_shared4(const float* from, AT_LINE) { return shared_get<float4>(from, line); }
DEVICE void store_shared(float* to, float value, AT_LINE) { shared_put(to, value, line); }
DEVICE void store_shared4(float* to, float4 value, AT_LINE) { shared_put(to, value, line); }
DEVICE unsigned load_shared_word(const unsigned* from, AT_LINE) {
  return shared_get<unsigned>(from, line);
}
DEVICE void store_shared_word(unsigned* to, unsigned value, AT_LINE) { shared_put(to, value, line); }
template <int kBytes> DEVICE Packet<kBytes> load_shared_packet(const void* from, AT_LINE) {
  shared_read(from, kBytes, line);
  return read_packet<kBytes>(from);
}
template <int kBytes>
DEVICE void store_shared_packet(void* to, const Packet<kBytes>& packet, AT_LINE) {
  shared_write(to, kBytes, line);
  __builtin_memcpy(to, packet.words, kBytes);
}

// -- Copies that complete later --

template <int kBytes> DEVICE void copy_async(void* to, const void* from, AT_LINE) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  copy_async(kInputRows, to, from, kBytes, line);
}
template <int kBytes> DEVICE void copy_numbers(void* to, const void* from, AT_LINE) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  copy_async(kInputColumns, to, from, kBytes, line);
}
DEVICE void bulk_load(void* to, const void* from, unsigned bytes, unsigned long long* barrier,
                      AT_LINE) {
  bulk_load(kInputRows, to, from, bytes, barrier, line);
}
DEVICE void bulk_load_numbers(void* to, const void* from, unsigned bytes,
                              unsigned long long* barrier, AT_LINE) {
  bulk_load(kInputColumns, to, from, bytes, barrier, line);
}
template <int kPending> DEVICE void copy_async_wait(AT_LINE) { copy_async_wait(kPending, line); }
DEVICE void mbarrier_wait_cluster(unsigned long long* barrier, unsigned phase, AT_LINE) {
  mbarrier_wait(barrier, phase, true, line);
}
DEVICE void mbarrier_wait_sums(unsigned long long* barrier, unsigned phase, AT_LINE) {
  mbarrier_wait(barrier, phase, true, line);
}
DEVICE void bulk_store(float* to, const float* from, unsigned bytes, AT_LINE) {
  bulk_to_global(to, from, bytes, false, line);
}
DEVICE void bulk_add(float* to, const float* from, unsigned bytes, AT_LINE) {
  bulk_to_global(to, from, bytes, true, line);
}
DEVICE void bulk_wait_written(AT_LINE) { bulk_wait(true, line); }
// cp.async.bulk.wait_group.read, which no template uses: the mutation tests put it where the full
// wait belongs.
DEVICE void bulk_wait_read(AT_LINE) { bulk_wait(false, line); }
