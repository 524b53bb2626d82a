// Threads as fibers, and the scheduler that a seed controls.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <tuple>

#include "machine.h"

extern "C" {
void rmsnorm_backward(const void*, const void*, const void*, const void*, void*, void*, void*,
                      void*, void*, long long, long long, long long, long long, int, int);
void sum_partials(const void*, void*, int, int) __attribute__((weak));
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

constexpr std::size_t kStackBytes = 32768;
constexpr std::uint64_t kCanary = 0x5afe57ac5afe57acu;
constexpr unsigned long long kMostSteps = 100'000'000;

void fill_canary(unsigned char* stack) { *reinterpret_cast<std::uint64_t*>(stack) = kCanary; }

unsigned char* stack_of(const Cta& cta, unsigned thread);

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

void thread_main() {
  Thread& self = *m.current;
  const Launch& l = m.launch;
  const Buffer* b = m.buffers;
  if (self.cta->grid == &m.main)
    rmsnorm_backward(b[kX].base, b[kDy].base, b[kRstd].base, b[kWeight].base, b[kDx].base,
                     b[kDw].base, b[kCounters].base, b[kZeroed].base, b[kScratch].base, l.rows,
                     l.x_stride, l.dy_stride, l.dx_stride, static_cast<int>(l.columns),
                     static_cast<int>(l.group));
  else
    sum_partials(b[kScratch].base, b[kDw].base, static_cast<int>(l.grid / l.cluster),
                 static_cast<int>(l.columns));
  Cta& cta = *self.cta;
  if (cta.barrier.arrived)
    fault(0, "divergent barrier: it ends while thread %u waits at the CTA barrier of line %d",
          cta.barrier.first, cta.barrier.line);
  if (*reinterpret_cast<std::uint64_t*>(stack_of(cta, self.index)) != kCanary)
    fault(0, "overflows the %zu-byte stack that the executor gives a thread", kStackBytes);
  self.done = true;
  --cta.alive;
  suspend();
  __builtin_unreachable();
}

// ---- CTAs ----

struct Slot {
  Cta cta;
  unsigned char* stacks;
};
std::vector<std::unique_ptr<Slot>> slots[2];  // of the main and of the second kernel

unsigned char* stack_of(const Cta& cta, unsigned thread) {
  // The CTA is the first member of its slot.
  return reinterpret_cast<const Slot&>(cta).stacks + thread * kStackBytes;
}

Cta& free_slot(Grid& grid) {
  auto& pool = slots[&grid == &m.sum];
  for (auto& slot : pool)
    if (!slot->cta.running) return slot->cta;
  pool.push_back(std::make_unique<Slot>());
  Slot& slot = *pool.back();
  void* stacks = mmap(nullptr, grid.threads * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    std::fprintf(stderr, "no memory for the stacks of %u threads\n", grid.threads);
    std::exit(3);
  }
  slot.stacks = static_cast<unsigned char*>(stacks);
  slot.cta.threads.resize(grid.threads);
  slot.cta.warps.resize(grid.threads / kWarp);
  slot.cta.memory.resize(grid.shared_bytes + 128);
  slot.cta.cells.resize(grid.shared_bytes / m.launch.granule + 1);
  return slot.cta;
}

void start_cta(Grid& grid, unsigned block, Cluster* cluster) {
  Cta& cta = free_slot(grid);
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
    thread.cta = &cta;
    thread.warp = &cta.warps[t / kWarp];
    thread.index = t;
    thread.lane = t % kWarp;
    thread.team = t / grid.team_threads;
    thread.team_time = 1;
    thread.releases = 0;
    thread.done = thread.wrote_shared = thread.acquired = false;
    thread.knows_primary = &grid == &m.sum && !m.launch.dependent;
    thread.wait = Wait{};
    thread.polled = nullptr;
    thread.learned = Clock{};
    thread.bulk.clear();
    thread.groups.clear();
    unsigned char* stack = stack_of(cta, t);
    fill_canary(stack);
    // Tops of stacks at different distances from a page's start: else all share a few cache sets.
    thread.fiber.prepare(stack, kStackBytes - t * 320 % 4096, thread_main);
  }
  m.ctas.push_back(&cta);
  ++m.resident;
}

std::vector<std::unique_ptr<Cluster>> clusters;

void start_cluster(Grid& grid) {
  clusters.push_back(std::make_unique<Cluster>());
  const unsigned first = grid.order[grid.started++] * grid.cluster;
  for (unsigned rank = 0; rank < grid.cluster; ++rank)
    start_cta(grid, first + rank, clusters.back().get());
  for (Cta* cta : m.ctas)
    if (cta->cluster == clusters.back().get()) clusters.back()->ctas.push_back(cta);
}

bool has_unstarted(const Grid& grid) { return grid.started < grid.order.size(); }

// The grid whose next cluster may start now, or null.
Grid* startable() {
  Grid* grid = has_unstarted(m.main) ? &m.main : has_unstarted(m.sum) ? &m.sum : nullptr;
  if (grid == nullptr || m.resident + grid->cluster > std::max(m.residency, grid->cluster))
    return nullptr;
  if (grid == &m.sum && m.main.finished < m.main.ctas) {
    if (!m.launch.dependent) return nullptr;
    for (const Cta* cta : m.ctas)
      if (cta->grid == &m.main && !cta->allows_dependents) return nullptr;
  }
  return grid;
}

// ---- The scheduler ----

Policy draw_policy(Rng& rng) {
  static const unsigned kLand[] = {0, 3, 30, 100}, kYield[] = {0, 30, 100}, kBreak[] = {0, 10, 50};
  Policy p{};
  p.pick = static_cast<Policy::Pick>(rng.below(4));
  p.lanes = static_cast<Policy::Lanes>(rng.below(3));
  p.land_percent = kLand[rng.below(4)];
  p.yield_percent = kYield[rng.below(3)];
  p.break_percent = kBreak[rng.below(3)];
  p.start_percent = rng.below(2) ? 100 : 5;
  p.shuffled_ctas = rng.below(3) > 0;
  return p;
}

void leave_ready(Warp& warp) {
  Warp* last = m.ready.back();
  m.ready[static_cast<std::size_t>(warp.place)] = last;
  last->place = warp.place;
  m.ready.pop_back();
  warp.place = -1;
}

Warp& pick_warp() {
  const auto count = static_cast<unsigned>(m.ready.size());
  Warp* any = m.ready[m.rng.below(count)];
  switch (m.policy.pick) {
    case Policy::kAny:
      return *any;
    case Policy::kSameCta:  // stays with one CTA most of the time
      for (unsigned i = 0; i < 8 && any->cta->id != m.last_cta && !m.rng.chance(2); ++i)
        any = m.ready[m.rng.below(count)];
      m.last_cta = any->cta->id;
      return *any;
    case Policy::kStarve:  // some warps run only when nobody else can
      for (unsigned i = 0; i < 16 && any->priority % 4 == m.starved; ++i)
        any = m.ready[m.rng.below(count)];
      return *any;
    case Policy::kPriority:  // the most urgent one, until its priority is drawn anew
      for (Warp* warp : m.ready)
        if (warp->priority > any->priority) any = warp;
      if (m.rng.chance(2)) any->priority = static_cast<unsigned>(m.rng.next());
      return *any;
  }
  return *any;
}

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

std::string describe_wait(const Wait& wait) {
  const std::string line = " (line " + std::to_string(wait.line) + ")";
  const std::string object = std::to_string(wait.object);
  switch (wait.kind) {
    case Wait::kShuffle: return "at a shuffle" + line;
    case Wait::kWarpBarrier: return "at a warp barrier" + line;
    case Wait::kCtaBarrier: return "at the CTA barrier" + line;
    case Wait::kNamedBarrier: return "at barrier " + object + line;
    case Wait::kClusterBarrier: return "at the cluster barrier" + line;
    case Wait::kMbarrier: return "for phase " + std::to_string(wait.phase) + " of mbarrier " +
                                 object + line;
    case Wait::kCounter: {
      const auto* counters = reinterpret_cast<const unsigned*>(m.buffers[kCounters].base);
      return "for counters[" + object + "] to change from " +
             std::to_string(counters[wait.object]) + line;
    }
    case Wait::kBulkRead: return "for its bulk operations to have read" + line;
    case Wait::kBulkWritten: return "for its bulk operations to have written" + line;
    case Wait::kPrimary: return "for the first kernel to end" + line;
    case Wait::kNothing: break;
  }
  return "for nothing";
}

void report_deadlock() {
  // Threads of one CTA that wait for the same thing are named together.
  std::map<std::tuple<unsigned, int, int, unsigned>, std::pair<unsigned, const Thread*>> groups;
  for (const Cta* cta : m.ctas)
    for (const Thread& t : cta->threads) {
      if (t.done) continue;
      auto& group = groups[{cta->id, t.wait.kind, t.wait.line, t.wait.object}];
      if (group.first++ == 0) group.second = &t;
    }
  std::string text = "deadlock: nobody can run";
  unsigned named = 0;
  for (const auto& [key, group] : groups) {
    if (++named > 6) break;
    const auto& [count, thread] = group;
    text += "; " + thread_name(*thread->cta, thread->index);
    if (count > 1) text += " and " + std::to_string(count - 1) + " more of it wait ";
    else text += " waits ";
    text += describe_wait(thread->wait);
  }
  if (groups.size() > 6) text += "; and " + std::to_string(groups.size() - 6) + " more groups";
  for (const Grid* grid : {&m.main, &m.sum})
    if (has_unstarted(*grid))
      text += "; " + std::to_string(grid->ctas - grid->started * grid->cluster) + " CTAs of " +
              grid->kernel + " have not started, because " + std::to_string(m.resident) +
              " are resident";
  fault(0, "%s", text.c_str());
}

void set_up(Grid& grid, const char* kernel, unsigned ctas, unsigned threads, unsigned shared,
            unsigned cluster, unsigned team, unsigned first_id) {
  grid.kernel = kernel;
  grid.ctas = ctas;
  grid.threads = threads;
  grid.shared_bytes = shared;
  grid.cluster = cluster;
  grid.team_threads = team;
  grid.first_id = first_id;
  grid.started = grid.finished = 0;
  grid.order.resize(ctas / cluster);
  for (unsigned i = 0; i < grid.order.size(); ++i) grid.order[i] = i;
  if (!m.policy.shuffled_ctas) return;
  for (unsigned i = static_cast<unsigned>(grid.order.size()); i > 1; --i)
    std::swap(grid.order[i - 1], grid.order[m.rng.below(i)]);
}

}  // namespace

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

void run_schedule(std::uint64_t seed, unsigned residency) {
  const Launch& l = m.launch;
  m.rng = Rng{seed};
  m.policy = draw_policy(m.rng);
  m.starved = m.rng.below(4);
  m.last_cta = 0;
  m.steps = 0;
  m.fault.clear();
  m.residency = residency;
  m.resident = 0;
  m.ctas.clear();
  m.ready.clear();
  m.copies.clear();
  m.flying.clear();
  m.current = nullptr;
  for (auto& pool : slots)
    for (auto& slot : pool) slot->cta.running = false;
  clusters.clear();
  constexpr unsigned kStaticShared = 49152;  // the most that a kernel may declare
  set_up(m.main, "rmsnorm_backward", l.grid, l.threads, l.shared_bytes, l.cluster, l.team_threads,
         0);
  set_up(m.sum, "sum_partials", l.sum_grid, l.sum_threads, kStaticShared, 1, l.sum_threads,
         l.grid);
  reset_memory();
  while (m.fault.empty()) {
    if (++m.steps > kMostSteps) {
      fault(0, "no end after %llu turns of warps", kMostSteps);
      break;
    }
    if (!m.flying.empty() && m.rng.chance(m.policy.land_percent)) {
      land_one();
      continue;
    }
    Grid* const next = startable();
    if (next && (m.ready.empty() || m.rng.chance(m.policy.start_percent)))
      start_cluster(*next);
    else if (!m.ready.empty())
      run_turn(pick_warp());
    else if (!m.flying.empty())
      land_one();
    else if (m.ctas.empty())
      break;
    else
      report_deadlock();
  }
  if (m.fault.empty()) check_end_state();
}

}  // namespace normforge
