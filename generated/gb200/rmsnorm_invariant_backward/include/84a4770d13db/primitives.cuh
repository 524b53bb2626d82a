#ifndef NORMFORGE_HOST
// ---- Primitives -----------------------------------------------------------------------------
// Every instruction without a C++ spelling, and every access to memory that other threads can see, is
// one named function here. The CPU emulator has functions of its own in their place.

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
template <typename T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

// kBytes of consecutive elements, in registers.
template <int kBytes> struct Packet { unsigned words[(kBytes + 3) / 4]; };

#define DEVICE __device__ __forceinline__
// The parameters of a kernel, read in place from the constant bank.
#define ARGUMENTS(type, name) const __grid_constant__ type name

// -- Numbers. Every rounding is written out; the build turns contraction off. --

DEVICE float widen_fp16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DEVICE unsigned short narrow_bf16(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
DEVICE unsigned short narrow_fp16(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
DEVICE unsigned pack_bf16(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
DEVICE unsigned pack_fp16(float low, float high) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// -- Global memory --

// Read-only inputs: the non-coherent path. POLICY is PTX that creates a cache policy, HINT is what
// follows `ld.global`, and OPERAND passes the policy.
#define LOAD_READ_ONLY(POLICY, HINT, OPERAND)                                                   \
  Packet<kBytes> packet;                                                                        \
  if constexpr (kBytes == 2) {                                                                  \
    unsigned short half;                                                                        \
    asm volatile("{" POLICY "ld.global" HINT ".u16 %0, [%1]" OPERAND ";}"                       \
                 : "=h"(half) : "l"(from));                                                     \
    packet.words[0] = half;                                                                     \
  } else if constexpr (kBytes == 4) {                                                           \
    asm volatile("{" POLICY "ld.global" HINT ".u32 %0, [%1]" OPERAND ";}"                       \
                 : "=r"(packet.words[0]) : "l"(from));                                          \
  } else if constexpr (kBytes == 8) {                                                           \
    asm volatile("{" POLICY "ld.global" HINT ".v2.u32 {%0, %1}, [%2]" OPERAND ";}"              \
                 : "=r"(packet.words[0]), "=r"(packet.words[1]) : "l"(from));                   \
  } else if constexpr (kBytes == 16) {                                                          \
    asm volatile("{" POLICY "ld.global" HINT ".v4.u32 {%0, %1, %2, %3}, [%4]" OPERAND ";}"      \
                 : "=r"(packet.words[0]), "=r"(packet.words[1]), "=r"(packet.words[2]),         \
                   "=r"(packet.words[3]) : "l"(from));                                          \
  } else {                                                                                      \
    static_assert(kBytes == 32, "vectors have 2 to 32 bytes");                                  \
    asm volatile("{" POLICY "ld.global" HINT                                                    \
                 ".v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8]" OPERAND ";}"                  \
                 : "=r"(packet.words[0]), "=r"(packet.words[1]), "=r"(packet.words[2]),         \
                   "=r"(packet.words[3]), "=r"(packet.words[4]), "=r"(packet.words[5]),         \
                   "=r"(packet.words[6]), "=r"(packet.words[7]) : "l"(from));                   \
  }                                                                                             \
  return packet

// x and dy, with the cache hint of the config.
template <int kBytes> DEVICE Packet<kBytes> load_row(const void* from) {
  LOAD_READ_ONLY(ROW_POLICY, ROW_LOAD ROW_HINT, ROW_OPERAND);
}
template <int kBytes> DEVICE Packet<kBytes> load_weight(const void* from) {
  LOAD_READ_ONLY("", ".nc", "");
}
DEVICE float load_rstd(const float* from) { return __ldg(from); }

// dx, with the cache hint of the config.
template <int kBytes> DEVICE void store_row(void* to, const Packet<kBytes>& packet) {
  const unsigned* w = packet.words;
  if constexpr (kBytes == 2) {
    asm volatile("st.global" ROW_STORE ".u16 [%0], %1;" ::"l"(to), "h"((unsigned short)w[0])
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("st.global" ROW_STORE ".u32 [%0], %1;" ::"l"(to), "r"(w[0]) : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global" ROW_STORE ".v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1])
                 : "memory");
  } else if constexpr (kBytes == 16) {
    asm volatile("st.global" ROW_STORE ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]),
                 "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  } else {
    asm volatile("st.global" ROW_STORE ".v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(to),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(w[4]), "r"(w[5]), "r"(w[6]),
                 "r"(w[7])
                 : "memory");
  }
}
DEVICE void store_dw(bf16* to, float value) { to->bits = narrow_bf16(value); }
DEVICE void store_dw(fp16* to, float value) { to->bits = narrow_fp16(value); }
DEVICE void store_dw(float* to, float value) { *to = value; }
// A gradient that this launch adds to. One thread reads and writes each element, once.
DEVICE float load_dw(const float* from) { return *from; }

// The workspace, through which CTAs exchange data. Strong (relaxed) loads read from the L2, where the
// writes of other SMs arrive, so stale L1 lines are no concern.
DEVICE float4 load_workspace(const float* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
DEVICE void store_workspace(float* to, float4 v) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w) : "memory");
}
DEVICE void store_workspace_word(float* to, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
DEVICE void add_workspace(float* to, float4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(v.x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(v.y) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 2), "f"(v.z) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 3), "f"(v.w) : "memory");
#endif
}

// Four words of the workspace that are their own arrival flags: a word whose bits are all 0 has not
// been sent yet. Strong (relaxed) at gpu scope. Each word is an access of its own (PTX ISA, memory
// consistency model, vector data types).
DEVICE void send_words(float* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w) : "memory");
}
DEVICE float4 receive_words(const float* from) { return load_workspace(from); }
DEVICE void empty_words(float* at) { send_words(at, make_float4(0.0f, 0.0f, 0.0f, 0.0f)); }

// -- Counters in the workspace, at gpu scope --

DEVICE unsigned load_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
DEVICE unsigned load_relaxed(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
DEVICE void store_release(unsigned* counter, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
DEVICE void store_relaxed(unsigned* counter, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
DEVICE unsigned take_ticket(unsigned* counter) {
  unsigned ticket;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(counter)
               : "memory");
  return ticket;
}

// A ledger: a counter of 64 bits with several fields.
using Ledger = unsigned long long;
DEVICE Ledger read_acquire(const Ledger* ledger) {
  Ledger value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(ledger) : "memory");
  return value;
}
DEVICE Ledger read_relaxed(const Ledger* ledger) {
  Ledger value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(ledger) : "memory");
  return value;
}
DEVICE void book_relaxed(Ledger* ledger, Ledger entry) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(ledger), "l"(entry) : "memory");
}
// These return what the ledger held before the entry.
DEVICE Ledger book_in_order(Ledger* ledger, Ledger entry) {
  Ledger before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before)
               : "l"(ledger), "l"(entry) : "memory");
  return before;
}
DEVICE Ledger book_and_read(Ledger* ledger, Ledger entry) {
  Ledger before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before)
               : "l"(ledger), "l"(entry) : "memory");
  return before;
}
// book_and_read for thread 0 only, so that nothing waits for the result. If the address is uniform, the
// compiler combines the additions of a warp and reads the result at once to hand out shares of it.
// Adding the lane's number, which is 0 for thread 0, makes the address look different in each thread.
DEVICE Ledger book_and_read_later(Ledger* ledger, Ledger entry) {
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return book_and_read(ledger + lane, entry);
}

// -- Shared memory --

// One array per kernel. Its size comes from the launch, or from the code.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define STATIC_SHARED(type, name, count) __shared__ __align__(16) type name[count]

DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
DEVICE float load_shared(const float* from) { return *from; }
DEVICE float4 load_shared4(const float* from) { return *reinterpret_cast<const float4*>(from); }
DEVICE void store_shared(float* to, float value) { *to = value; }
DEVICE void store_shared4(float* to, float4 value) { *reinterpret_cast<float4*>(to) = value; }
DEVICE unsigned load_shared_word(const unsigned* from) { return *from; }
DEVICE void store_shared_word(unsigned* to, unsigned value) { *to = value; }

// Volatile, so that a reload reads again instead of keeping the first values in registers.
template <int kBytes> DEVICE Packet<kBytes> load_shared_packet(const void* from) {
  Packet<kBytes> p;
  const unsigned a = shared_address(from);
  if constexpr (kBytes == 2) {
    unsigned short half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(a) : "memory");
    p.words[0] = half;
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(p.words[0]) : "r"(a) : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(p.words[0]), "=r"(p.words[1]) : "r"(a)
                 : "memory");
  } else {
    static_assert(kBytes == 16, "shared-memory vectors have 2 to 16 bytes");
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3]) : "r"(a)
                 : "memory");
  }
  return p;
}
template <int kBytes> DEVICE void store_shared_packet(void* to, const Packet<kBytes>& p) {
  const unsigned a = shared_address(to);
  if constexpr (kBytes == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((unsigned short)p.words[0]) : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(p.words[0]) : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(a), "r"(p.words[0]), "r"(p.words[1])
                 : "memory");
  } else {
    static_assert(kBytes == 16, "shared-memory vectors have 2 to 16 bytes");
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(p.words[0]),
                 "r"(p.words[1]), "r"(p.words[2]), "r"(p.words[3])
                 : "memory");
  }
}

// -- Threads of one CTA --

DEVICE float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE void cta_barrier() { __syncthreads(); }
// A barrier of `threads` threads of the CTA. Ids are 1 to 15; cta_barrier uses 0.
DEVICE void named_barrier(unsigned id, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// -- Per-thread asynchronous copies (sm_80): x, dy and the residual --

template <int kBytes> DEVICE void copy_async(void* to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("{" ROW_POLICY "cp.async.cg.shared.global" ROW_HINT " [%0], [%1], 16" ROW_OPERAND
                 ";}" ::"r"(shared_address(to)), "l"(from) : "memory");
  } else {
    asm volatile("{" ROW_POLICY "cp.async.ca.shared.global" ROW_HINT " [%0], [%1], %2" ROW_OPERAND
                 ";}" ::"r"(shared_address(to)), "l"(from), "n"(kBytes) : "memory");
  }
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#if __CUDA_ARCH__ >= 900
// -- Transaction barriers and bulk copies (sm_90) --

DEVICE void mbarrier_init(unsigned long long* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and, after the next cluster barrier, to the
// other CTAs of the cluster.
DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// One arrival. The phase completes only after `bytes` more bytes have landed.
DEVICE void mbarrier_expect(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)), "r"(bytes) : "memory");
}
DEVICE bool mbarrier_try_wait(unsigned long long* barrier, unsigned phase) {
  unsigned done;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  return done != 0;
}
DEVICE void mbarrier_wait(unsigned long long* barrier, unsigned phase) {
  while (!mbarrier_try_wait(barrier, phase)) {
  }
}
// x, dy and the residual.
DEVICE void bulk_load(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
  asm volatile("{" ROW_POLICY
               "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" ROW_HINT
               " [%0], [%1], %2, [%3]" ROW_OPERAND ";}" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
DEVICE void bulk_store(float* to, const float* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes) : "memory");
}
DEVICE void bulk_add(float* to, const float* from, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until every committed bulk operation of this thread has written its destination. The `.read`
// form returns when the sources have been read, which says nothing about the destination.
DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's generic-proxy accesses against async-proxy ones, in both directions.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// -- Clusters (sm_90) --

DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes `value` to where `to` lies in CTA `rank` of the cluster, and counts its 4 bytes on that CTA's
// copy of `barrier`.
DEVICE void store_cluster(float* to, float value, unsigned long long* barrier, unsigned rank) {
  unsigned address, remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(to)),
               "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote)
               : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::
                   "r"(address), "f"(value), "r"(remote) : "memory");
}
// mbarrier_wait with an acquire at cluster scope, for data that other CTAs of the cluster send.
DEVICE void mbarrier_wait_cluster(unsigned long long* barrier, unsigned phase) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  }
}

// -- Programmatic dependent launch (sm_90) --

DEVICE void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEVICE void allow_dependents() {}
DEVICE void wait_for_primary() {}
#endif
#else
#include "normforge_host.h"
#endif
