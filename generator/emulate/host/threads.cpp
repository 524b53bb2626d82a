// CTAs of threads that are fibers, and the turns in which their warps run.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "machine.h"

extern "C" {
void main_kernel(const void* arguments);  // build.py gives the name; it takes a reference
void sum_partials(const void*, void*, int, int, int, int) __attribute__((weak));
}

Dim threadIdx, blockIdx, gridDim;

#if defined(NORMFORGE_FAST_SWITCH)
asm(R"(
.text
.globl normforge_switch
normforge_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

namespace normforge {

Machine m;

namespace {

constexpr std::size_t kStackBytes = 32768;  // build.py refuses kernels whose frames come near it

// ---- Fibers ----

void set_current(Thread* thread) {
  m.current = thread;
  threadIdx.x = thread->index;
  blockIdx.x = thread->cta->block;
  gridDim.x = thread->cta->grid->ctas;
}

// The next lane of the turn under way, or null when the turn is over.
Thread* take_lane() {
  const unsigned lanes = m.turn->turn & m.turn->ready;
  if (lanes == 0) return nullptr;
  unsigned lane = static_cast<unsigned>(__builtin_ctz(lanes));
  if (m.policy.lanes == Policy::kDescending) {
    lane = 31 - static_cast<unsigned>(__builtin_clz(lanes));
  } else if (m.policy.lanes == Policy::kRotated) {
    const unsigned above = lanes & kFullWarp << (m.turn->priority % kWarp);
    if (above) lane = static_cast<unsigned>(__builtin_ctz(above));
  }
  m.turn->turn &= ~(1u << lane);
  m.turn->ready &= ~(1u << lane);
  return m.turn->threads + lane;
}

// Leaves the current thread, which is either ready again or waits for something.
void suspend() {
  Thread* const self = m.current;
  if (Thread* next = take_lane()) {
    set_current(next);
    switch_fiber(self->fiber, next->fiber);
  } else {
    m.current = nullptr;
    switch_fiber(self->fiber, m.scheduler);
  }
}

void finish_cta(Cta& cta) {
  if (cta.arriving || cta.leaving) {
    fault(0, "%s ends while %u bulk operations on its shared memory are under way",
          thread_name(cta, kUnset).c_str(), cta.arriving + cta.leaving);
    return;
  }
  cta.running = false;
  ++cta.grid->finished;
  --m.resident;
  m.ctas.erase(std::find(m.ctas.begin(), m.ctas.end(), &cta));
  if (cta.grid == &m.main && m.main.finished == m.main.ctas)
    for (Cta* other : m.ctas)
      for (Thread& thread : other->threads)
        if (thread.wait.kind == Wait::kPrimary) make_ready(thread);
}

// A parameter of the second kernel.
template <typename T> T parameter(unsigned index) {
  T value;
  std::memcpy(&value, &m.arguments[m.second[index]], sizeof value);
  return value;
}

void thread_main() {
  Thread& self = *m.current;
  if (self.cta->grid == &m.main)
    main_kernel(m.arguments.data());
  else
    sum_partials(parameter<const void*>(0), parameter<void*>(1), parameter<int>(2),
                 parameter<int>(3), parameter<int>(4), parameter<int>(5));
  Cta& cta = *self.cta;
  const bool producer = self.index >= cta.threads.size() - cta.producers();
  if (cta.barrier.arrived && !producer)
    fault(0, "divergent barrier: it ends while thread %u waits at the CTA barrier of line %d",
          cta.barrier.first, cta.barrier.line);
  self.done = true;
  --cta.alive;
  if (cta.barrier.arrived && cta.barrier.arrived == cta.alive) open_cta_barrier(cta);
  suspend();
  __builtin_unreachable();
}

// ---- CTAs ----

std::vector<std::unique_ptr<Cta>> pool[2];  // of the main and of the second kernel
std::vector<std::unique_ptr<Cluster>> clusters;

Cta& free_cta(Grid& grid) {
  auto& ctas = pool[&grid == &m.sum];
  for (auto& cta : ctas)
    if (!cta->running) return *cta;
  ctas.push_back(std::make_unique<Cta>());
  Cta& cta = *ctas.back();
  void* stacks = mmap(nullptr, grid.threads * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    std::fprintf(stderr, "no memory for the stacks of %u threads\n", grid.threads);
    std::exit(3);
  }
  cta.stacks = static_cast<unsigned char*>(stacks);
  cta.threads.resize(grid.threads);
  cta.warps.resize(grid.threads / kWarp);
  cta.memory.resize(grid.shared_bytes + 128);
  cta.cells.resize(grid.shared_bytes / m.launch.granule + 1);
  return cta;
}

void start_cta(Grid& grid, unsigned block, Cluster* cluster) {
  Cta& cta = free_cta(grid);
  cta.grid = &grid;
  cta.cluster = cluster;
  cta.block = block;
  cta.id = grid.first_id + block;
  cta.rank = block % grid.cluster;
  cta.alive = grid.threads;
  cta.time = 1;
  cta.running = true;
  cta.allows_dependents = false;
  cta.arriving = cta.leaving = 0;
  cta.barrier = Barrier{};
  std::fill(std::begin(cta.named), std::end(cta.named), Barrier{});
  cta.mbarriers.clear();
  cta.waited.clear();
  cta.known = Clock{};
  const auto start = reinterpret_cast<std::uintptr_t>(cta.memory.data());
  cta.shared = cta.memory.data() + ((start + 127) / 128 * 128 - start);
  cta.shared_bytes = &grid == &m.main ? grid.shared_bytes : 0;  // static_shared says how much
  clear_shared(cta);
  for (unsigned w = 0; w < cta.warps.size(); ++w) {
    Warp& warp = cta.warps[w];
    warp = Warp{};
    warp.cta = &cta;
    warp.threads = &cta.threads[w * kWarp];
    warp.ready = kFullWarp;
    warp.priority = static_cast<unsigned>(m.rng.next());
    warp.place = static_cast<int>(m.ready.size());
    m.ready.push_back(&warp);
  }
  for (unsigned t = 0; t < grid.threads; ++t) {
    Thread& thread = cta.threads[t];
    thread = Thread{};
    thread.cta = &cta;
    thread.warp = &cta.warps[t / kWarp];
    thread.index = t;
    thread.lane = t % kWarp;
    thread.team = t / grid.team_threads;
    thread.knows_primary = &grid == &m.sum && !m.launch.dependent;
    // Tops of stacks at different distances from a page's start: else all share a few cache sets.
    thread.fiber.prepare(cta.stacks + t * kStackBytes, kStackBytes - t * 320 % 4096, thread_main);
  }
  m.ctas.push_back(&cta);
  ++m.resident;
}

void leave_ready(Warp& warp) {
  Warp* last = m.ready.back();
  m.ready[static_cast<std::size_t>(warp.place)] = last;
  last->place = warp.place;
  m.ready.pop_back();
  warp.place = -1;
}

}  // namespace

void start_cluster(Grid& grid) {
  clusters.push_back(std::make_unique<Cluster>());
  Cluster& cluster = *clusters.back();
  const unsigned first = grid.order[grid.started++] * grid.cluster;
  for (unsigned rank = 0; rank < grid.cluster; ++rank) {
    start_cta(grid, first + rank, &cluster);
    cluster.ctas.push_back(m.ctas.back());
  }
}

void end_all_ctas() {
  for (auto& ctas : pool)
    for (auto& cta : ctas) cta->running = false;
  clusters.clear();
}

// ---- Turns ----

void run_turn(Warp& warp) {
  m.turn = &warp;
  warp.turn = warp.ready;
  Thread* first = take_lane();
  set_current(first);
  switch_fiber(m.scheduler, first->fiber);
  m.current = nullptr;
  m.turn = nullptr;
  if (!m.fault.empty()) return;
  if (warp.ready == 0) leave_ready(warp);
  if (warp.cta->alive == 0 && warp.cta->running) finish_cta(*warp.cta);
}

void make_ready(Thread& thread) {
  thread.wait.kind = Wait::kNothing;
  Warp& warp = *thread.warp;
  warp.ready |= 1u << thread.lane;
  if (warp.place < 0) {
    warp.place = static_cast<int>(m.ready.size());
    m.ready.push_back(&warp);
  }
}

void wait_for(Wait::Kind kind, int line, unsigned object, unsigned phase) {
  m.current->wait = Wait{kind, line, object, phase};
  suspend();
  m.current->wait.kind = Wait::kNothing;
}

void maybe_yield() {
  if (!m.rng.chance(m.policy.yield_percent)) return;
  make_ready(*m.current);
  suspend();
}

std::string thread_name(const Cta& cta, unsigned thread) {
  std::string name = cta.grid == &m.sum ? "sum_partials CTA " : "CTA ";
  name += std::to_string(cta.block);
  if (thread != kUnset) name += " thread " + std::to_string(thread);
  return name;
}

void fault(int line, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Thread* const self = m.current;
  if (m.fault.empty()) {
    if (self) m.fault = thread_name(*self->cta, self->index) + ": ";
    m.fault += text;
    if (line) m.fault += " (line " + std::to_string(line) + ")";
  }
  if (self == nullptr) return;
  m.current = nullptr;
  switch_fiber(self->fiber, m.scheduler);
  __builtin_unreachable();
}

}  // namespace normforge
