// What the host twins of the kernel's primitives ask of the emulator.
//
// Every function that a thread of the kernel may wait in can switch to another thread. `line` is
// the line of the rendered source that the access or wait comes from. A function that finds a fault
// ends the schedule and does not return.
#pragma once

#define AT_LINE int line = __builtin_LINE()  // of the call

struct Dim {
  unsigned x;
};
extern Dim threadIdx, blockIdx, gridDim;

namespace normforge {

// What is read: matrices, a number of a row, what all rows share.
enum Input { kInputRows, kInputRow, kInputColumns };
// What is written: matrices, or number by number: sums over rows, and what a forward saves of each.
enum Output { kOutputRows, kOutputDw };

// Global memory: each checks the access, which the caller then makes.
void input_read(Input input, const void* from, unsigned bytes, int line);
void output_write(Output output, const void* to, unsigned bytes, int line);
void output_read(const void* from, unsigned bytes, int line);  // sums that are added to
void workspace_read(const float* from, unsigned count, int line);
void workspace_write(const float* to, unsigned count, int line);
void workspace_add(float* to, const float* values, unsigned count, int line);  // adds, too

// Four words that tell by themselves whether they have arrived; these make the access, too.
void mail_send(float* to, const float* values, int line);
void mail_receive(const float* from, float* values, int line);
void mail_empty(float* at, int line);

unsigned counter_load(const unsigned* counter, bool acquire, int line);
void counter_store(unsigned* counter, unsigned value, bool release, int line);
unsigned counter_add_one(unsigned* counter, int line);  // acquires and releases

// A counter of 64 bits, at two words.
unsigned long long ledger_read(const unsigned long long* ledger, bool acquire, int line);
unsigned long long ledger_add(unsigned long long* ledger, unsigned long long entry, bool ordered,
                              int line);  // ordered: acquires and releases

// Shared memory: each checks the access, which the caller then makes.
unsigned char* dynamic_shared();
void* static_shared(unsigned bytes);
void shared_read(const void* from, unsigned bytes, int line);
void shared_write(const void* to, unsigned bytes, int line);

// Threads that wait for each other.
float shuffle_xor(float value, int mask, AT_LINE);
float shuffle_from(float value, int lane, AT_LINE);
unsigned warp_index(AT_LINE);
bool elected(AT_LINE);
void warp_barrier(AT_LINE);
void cta_barrier(AT_LINE);
void named_barrier(unsigned id, unsigned threads, AT_LINE);
void cluster_barrier(AT_LINE);
void cluster_barrier_of_inits(AT_LINE);
unsigned cluster_rank();

// Copies that complete later.
void copy_async(Input input, void* to, const void* from, unsigned bytes, int line);
void copy_async_commit();
void copy_async_wait(unsigned pending, int line);

void mbarrier_init(unsigned long long* barrier, unsigned arrivals, AT_LINE);
void mbarrier_init_fence();
void mbarrier_expect(unsigned long long* barrier, unsigned bytes, AT_LINE);
void mbarrier_arrive(unsigned long long* barrier, AT_LINE);
void mbarrier_wait(unsigned long long* barrier, unsigned phase, bool cluster = false, AT_LINE);
void bulk_load(Input input, void* to, const void* from, unsigned bytes, unsigned long long* barrier,
               int line);
void bulk_to_global(float* to, const float* from, unsigned bytes, bool add, int line);
void bulk_commit();
void bulk_wait(bool written, int line);
void fence_async_shared();
void fence_async_global();
void store_cluster(float* to, float value, unsigned long long* barrier, unsigned rank, AT_LINE);

// Programmatic dependent launch.
void allow_dependents();
void wait_for_primary(AT_LINE);

}  // namespace normforge
