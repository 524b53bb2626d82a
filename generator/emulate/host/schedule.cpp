// One schedule: what the seed decides, from the first CTA to the end or the first fault.
#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "machine.h"

namespace normforge {

namespace {

constexpr unsigned long long kMostSteps = 100'000'000;

Policy draw_policy(Rng& rng) {
  static const unsigned kLand[] = {0, 3, 30, 100}, kYield[] = {0, 30, 100}, kBreak[] = {0, 10, 50};
  static const unsigned kHide[] = {0, 10, 60}, kLook[] = {0, 50, 100};
  Policy p{};
  p.pick = static_cast<Policy::Pick>(rng.below(4));
  p.lanes = static_cast<Policy::Lanes>(rng.below(3));
  p.land_percent = kLand[rng.below(4)];
  p.yield_percent = kYield[rng.below(3)];
  p.break_percent = kBreak[rng.below(3)];
  p.start_percent = rng.below(2) ? 100 : 5;
  p.shuffled_ctas = rng.below(3) > 0;
  p.hide_percent = kHide[rng.below(3)];
  p.look_percent = kLook[rng.below(3)];
  return p;
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

void draw_order(Grid& grid) {
  grid.order.resize(grid.ctas / grid.cluster);
  std::iota(grid.order.begin(), grid.order.end(), 0);
  if (!m.policy.shuffled_ctas) return;
  for (unsigned i = static_cast<unsigned>(grid.order.size()); i > 1; --i)
    std::swap(grid.order[i - 1], grid.order[m.rng.below(i)]);
}

}  // namespace

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
    case Wait::kLedger: {
      const auto* counters = reinterpret_cast<const unsigned*>(m.buffers[kCounters].base);
      return "for the ledger at counters[" + object + "] to change from " +
             std::to_string(*reinterpret_cast<const unsigned long long*>(counters + wait.object)) +
             line;
    }
    case Wait::kMail: {
      const float* at = reinterpret_cast<const float*>(m.buffers[kZeroed].base) + wait.object;
      return "for " + place_of(at) + " to arrive" + line;
    }
    case Wait::kBulkRead: return "for its bulk operations to have read" + line;
    case Wait::kBulkWritten: return "for its bulk operations to have written" + line;
    case Wait::kPrimary: return "for the first kernel to end" + line;
    case Wait::kNothing: break;
  }
  return "for nothing";
}

void run_schedule(std::uint64_t seed, unsigned residency) {
  const Launch& l = m.launch;
  static_cast<State&>(m) = State{};
  m.rng = Rng{seed};
  m.policy = draw_policy(m.rng);
  m.starved = m.rng.below(4);
  m.residency = residency;
  end_all_ctas();
  m.main = {"the main kernel", l.grid, l.threads, l.shared_bytes, l.cluster, l.team_threads,
            l.producer != 0, 0};
  m.sum = {"sum_partials", l.sum_grid, l.sum_threads, kStaticShared, 1, l.sum_threads, false,
           l.grid};
  draw_order(m.main);
  draw_order(m.sum);
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
    else if (!wake_looker())
      report_deadlock();
  }
  if (m.fault.empty()) check_end_state();
}

}  // namespace normforge
