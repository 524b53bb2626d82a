// CUDA's vocabulary and the host twins of templates/primitives.cuh: with NORMFORGE_HOST defined,
// the rendered source includes this file in place of that one and compiles as plain C++17.
//
// Arithmetic is IEEE fp32 rounded once per operation on both sides (contraction is off in both
// builds), so a kernel gives the same bits here as on a GPU.
#pragma once

#include "host_api.h"

// -- Vocabulary --

#define __global__
#define __launch_bounds__(...)
#define DEVICE inline __attribute__((always_inline))
#define ARGUMENTS(type, name) const type& name
#define AT_LINE int line = __builtin_LINE()

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
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

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
  normforge::input_read(normforge::kInputRows, from, kBytes, line);
  return read_packet<kBytes>(from);
}
template <int kBytes> DEVICE Packet<kBytes> load_weight(const void* from, AT_LINE) {
  normforge::input_read(normforge::kInputWeight, from, kBytes, line);
  return read_packet<kBytes>(from);
}
DEVICE float load_rstd(const float* from, AT_LINE) {
  normforge::input_read(normforge::kInputRstd, from, 4, line);
  return *from;
}
template <int kBytes> DEVICE void store_row(void* to, const Packet<kBytes>& packet, AT_LINE) {
  normforge::output_write(normforge::kOutputRows, to, kBytes, line);
  __builtin_memcpy(to, packet.words, kBytes);
}
DEVICE void store_dw(bf16* to, float value, AT_LINE) {
  normforge::output_write(normforge::kOutputDw, to, 2, line);
  to->bits = narrow_bf16(value);
}
DEVICE void store_dw(fp16* to, float value, AT_LINE) {
  normforge::output_write(normforge::kOutputDw, to, 2, line);
  to->bits = narrow_fp16(value);
}
DEVICE void store_dw(float* to, float value, AT_LINE) {
  normforge::output_write(normforge::kOutputDw, to, 4, line);
  *to = value;
}
DEVICE float load_dw(const float* from, AT_LINE) {
  normforge::output_read(from, 4, line);
  return *from;
}
DEVICE float4 load_workspace(const float* from, AT_LINE) {
  normforge::workspace_read(from, 4, line);
  return *reinterpret_cast<const float4*>(from);
}
DEVICE void store_workspace(float* to, float4 v, AT_LINE) {
  normforge::workspace_write(to, 4, line);
  *reinterpret_cast<float4*>(to) = v;
}
DEVICE void store_workspace_word(float* to, float value, AT_LINE) {
  normforge::workspace_write(to, 1, line);
  *to = value;
}
DEVICE void add_workspace(float* to, float4 v, AT_LINE) {
  normforge::workspace_add(to, &v.x, 4, line);
}
DEVICE void send_words(float* to, float4 v, AT_LINE) { normforge::mail_send(to, &v.x, line); }
DEVICE float4 receive_words(const float* from, AT_LINE) {
  float4 v;
  normforge::mail_receive(from, &v.x, line);
  return v;
}
DEVICE void empty_words(float* at, AT_LINE) { normforge::mail_empty(at, line); }

// -- Counters --

DEVICE unsigned load_acquire(const unsigned* counter, AT_LINE) {
  return normforge::counter_load(counter, true, line);
}
DEVICE unsigned load_relaxed(const unsigned* counter, AT_LINE) {
  return normforge::counter_load(counter, false, line);
}
DEVICE void store_release(unsigned* counter, unsigned value, AT_LINE) {
  normforge::counter_store(counter, value, true, line);
}
DEVICE void store_relaxed(unsigned* counter, unsigned value, AT_LINE) {
  normforge::counter_store(counter, value, false, line);
}
DEVICE unsigned take_ticket(unsigned* counter, AT_LINE) {
  return normforge::counter_add_one(counter, line);
}

using Ledger = unsigned long long;
DEVICE Ledger read_acquire(const Ledger* ledger, AT_LINE) {
  return normforge::ledger_read(ledger, true, line);
}
DEVICE Ledger read_relaxed(const Ledger* ledger, AT_LINE) {
  return normforge::ledger_read(ledger, false, line);
}
DEVICE void book_relaxed(Ledger* ledger, Ledger entry, AT_LINE) {
  normforge::ledger_add(ledger, entry, false, line);
}
DEVICE Ledger book_in_order(Ledger* ledger, Ledger entry, AT_LINE) {
  return normforge::ledger_add(ledger, entry, true, line);
}
DEVICE Ledger book_and_read(Ledger* ledger, Ledger entry, AT_LINE) {
  return normforge::ledger_add(ledger, entry, false, line);
}
DEVICE Ledger book_and_read_later(Ledger* ledger, Ledger entry, AT_LINE) {
  return normforge::ledger_add(ledger, entry, false, line);
}

// -- Shared memory --

#define DYNAMIC_SHARED(name) unsigned char* const name = normforge::dynamic_shared()
#define STATIC_SHARED(type, name, count) \
  type* const name = static_cast<type*>(normforge::static_shared((count) * sizeof(type)))

DEVICE float load_shared(const float* from, AT_LINE) {
  normforge::shared_read(from, 4, line);
  return *from;
}
DEVICE float4 load_shared4(const float* from, AT_LINE) {
  normforge::shared_read(from, 16, line);
  return *reinterpret_cast<const float4*>(from);
}
DEVICE void store_shared(float* to, float value, AT_LINE) {
  normforge::shared_write(to, 4, line);
  *to = value;
}
DEVICE void store_shared4(float* to, float4 value, AT_LINE) {
  normforge::shared_write(to, 16, line);
  *reinterpret_cast<float4*>(to) = value;
}
DEVICE unsigned load_shared_word(const unsigned* from, AT_LINE) {
  normforge::shared_read(from, 4, line);
  return *from;
}
DEVICE void store_shared_word(unsigned* to, unsigned value, AT_LINE) {
  normforge::shared_write(to, 4, line);
  *to = value;
}
template <int kBytes> DEVICE Packet<kBytes> load_shared_packet(const void* from, AT_LINE) {
  normforge::shared_read(from, kBytes, line);
  return read_packet<kBytes>(from);
}
template <int kBytes>
DEVICE void store_shared_packet(void* to, const Packet<kBytes>& packet, AT_LINE) {
  normforge::shared_write(to, kBytes, line);
  __builtin_memcpy(to, packet.words, kBytes);
}

// -- Threads of one CTA --

DEVICE float shuffle_xor(float value, int mask, AT_LINE) {
  return normforge::shuffle_xor(value, mask, line);
}
DEVICE void warp_barrier(AT_LINE) { normforge::warp_barrier(line); }
DEVICE void cta_barrier(AT_LINE) { normforge::cta_barrier(line); }
DEVICE void named_barrier(unsigned id, unsigned threads, AT_LINE) {
  normforge::named_barrier(id, threads, line);
}

// -- Copies that complete later --

template <int kBytes> DEVICE void copy_async(void* to, const void* from, AT_LINE) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  normforge::copy_async(to, from, kBytes, line);
}
DEVICE void copy_async_commit() { normforge::copy_async_commit(); }
template <int kPending> DEVICE void copy_async_wait(AT_LINE) {
  normforge::copy_async_wait(kPending, line);
}
DEVICE void mbarrier_init(unsigned long long* barrier, unsigned arrivals, AT_LINE) {
  normforge::mbarrier_init(barrier, arrivals, line);
}
DEVICE void mbarrier_init_fence() {}
DEVICE void mbarrier_expect(unsigned long long* barrier, unsigned bytes, AT_LINE) {
  normforge::mbarrier_expect(barrier, bytes, line);
}
DEVICE void mbarrier_wait(unsigned long long* barrier, unsigned phase, AT_LINE) {
  normforge::mbarrier_wait(barrier, phase, false, line);
}
DEVICE void mbarrier_wait_cluster(unsigned long long* barrier, unsigned phase, AT_LINE) {
  normforge::mbarrier_wait(barrier, phase, true, line);
}
DEVICE void bulk_load(void* to, const void* from, unsigned bytes, unsigned long long* barrier,
                      AT_LINE) {
  normforge::bulk_load(to, from, bytes, barrier, line);
}
DEVICE void bulk_store(float* to, const float* from, unsigned bytes, AT_LINE) {
  normforge::bulk_to_global(to, from, bytes, false, line);
}
DEVICE void bulk_add(float* to, const float* from, unsigned bytes, AT_LINE) {
  normforge::bulk_to_global(to, from, bytes, true, line);
}
DEVICE void bulk_commit() { normforge::bulk_commit(); }
DEVICE void bulk_wait_written(AT_LINE) { normforge::bulk_wait(true, line); }
// cp.async.bulk.wait_group.read, which no template uses: the mutation tests put it where the full
// wait belongs.
DEVICE void bulk_wait_read(AT_LINE) { normforge::bulk_wait(false, line); }
DEVICE void fence_async_shared() { normforge::fence_async_shared(); }
DEVICE void fence_async_global() { normforge::fence_async_global(); }

// -- Clusters and dependent launch --

DEVICE unsigned cluster_rank() { return normforge::cluster_rank(); }
DEVICE void cluster_barrier(AT_LINE) { normforge::cluster_barrier(line); }
DEVICE void store_cluster(float* to, float value, unsigned long long* barrier, unsigned rank,
                          AT_LINE) {
  normforge::store_cluster(to, value, barrier, rank, line);
}
DEVICE void allow_dependents() { normforge::allow_dependents(); }
DEVICE void wait_for_primary(AT_LINE) { normforge::wait_for_primary(line); }
