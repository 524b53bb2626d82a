// Threads that wait for each other: shuffles, barriers, counters, dependent launch; and what they
// learn of each other's writes by it.
#include <algorithm>

#include "machine.h"

namespace normforge {

// ---- Knowledge ----

void Clock::join(const Clock& other) {
  if (other.empty()) return;
  if (empty()) cta_time.resize(other.cta_time.size());
  for (std::size_t i = 0; i < cta_time.size(); ++i)
    cta_time[i] = std::max(cta_time[i], other.cta_time[i]);
  for (const Own& theirs : other.own) {
    auto mine = std::find_if(own.begin(), own.end(), [&](const Own& o) {
      return o.cta == theirs.cta && o.thread == theirs.thread;
    });
    if (mine == own.end())
      own.push_back(theirs);
    else
      mine->release = std::max(mine->release, theirs.release);
  }
}

bool Clock::knows(const Word& word) const {
  if (empty()) return false;
  if (word.event.cta_time < cta_time[word.cta]) return true;
  return std::any_of(own.begin(), own.end(), [&](const Own& o) {
    return o.cta == word.cta && o.thread + 1 == word.event.who && word.release <= o.release;
  });
}

namespace {

// What a release of the thread makes known: what it learned, what its CTA did before the
// last CTA barrier, and what the thread itself has done.
Clock release_clock(Thread& t) {
  Clock clock = t.cta->known;
  clock.join(t.learned);
  clock.cta_time.resize(m.launch.grid + m.launch.sum_grid);
  clock.cta_time[t.cta->id] = std::max(clock.cta_time[t.cta->id], t.cta->time);
  Clock own;
  own.cta_time.resize(clock.cta_time.size());
  own.own.push_back({t.cta->id, t.index, t.releases++});
  clock.join(own);
  return clock;
}

// A CTA barrier has been passed by all threads.
void pass_cta_barrier(Cta& cta) {
  ++cta.time;
  for (Thread& thread : cta.threads) {
    if (thread.learned.empty()) continue;
    cta.known.join(thread.learned);
    thread.learned = Clock{};
  }
}

// All lanes of a warp meet. The last to come goes on; the others can run again.
void meet(Wait::Kind kind, int line, unsigned object) {
  Thread& self = *m.current;
  Warp& warp = *self.warp;
  if (warp.arrived == 0) {
    warp.meeting = Wait{kind, line, object, 0};
  } else if (warp.meeting.kind != kind || warp.meeting.line != line ||
             warp.meeting.object != object) {
    fault(line, "divergent warp: other lanes wait at line %d", warp.meeting.line);
  }
  warp.arrived |= 1u << self.lane;
  if (warp.arrived != kFullWarp) {
    wait_for(kind, line, object);
    return;
  }
  warp.arrived = 0;
  warp.parity ^= 1;
  if (kind == Wait::kWarpBarrier && self.cta->grid->team_threads == kWarp) {
    const unsigned time = self.team_time + 1;
    for (unsigned lane = 0; lane < kWarp; ++lane) pass_team_barrier(warp.threads[lane], time);
  }
  if (kind == Wait::kWarpBarrier) {
    warp.unfenced = nullptr;
    for (unsigned lane = 0; lane < kWarp; ++lane)
      if (warp.threads[lane].reads_copied) warp.unfenced = &warp.threads[lane];
  }
  const unsigned others = kFullWarp & ~(1u << self.lane);
  warp.ready |= others;  // the warp that runs is on the list of ready ones
  // In one turn the warp goes from meeting to meeting, unless the seed lets others in between.
  if (!m.rng.chance(m.policy.break_percent)) warp.turn |= others;
}

// Whether the thread is the last one to come to a barrier. The others return when it has come.
// alive: those of the threads that have not ended.
bool last_at(Barrier& barrier, std::size_t threads, std::size_t alive, Wait::Kind kind, unsigned id,
             int line) {
  if (barrier.arrived == 0)
    barrier = {0, static_cast<unsigned>(threads), m.current->index, line};
  else if (barrier.line != line || barrier.threads != threads)
    fault(line, "divergent barrier: thread %u waits %s for %u threads", barrier.first,
          describe_wait({kind, barrier.line, id}).c_str(), barrier.threads);
  if (++barrier.arrived < alive) {
    wait_for(kind, line, id);
    return false;
  }
  barrier.arrived = 0;
  return true;
}

}  // namespace

void pass_team_barrier(Thread& thread, unsigned time) {
  thread.team_time = std::max(thread.team_time, time);
}

// ---- A warp ----

namespace {

// The value of another lane. object: by which the meeting is known.
float value_of(unsigned lane, float value, unsigned object, int line) {
  Warp& warp = *m.current->warp;
  const unsigned parity = warp.parity;  // two sets: a lane that is ahead writes the other one
  warp.values[parity][m.current->lane] = value;
  meet(Wait::kShuffle, line, object);
  return warp.values[parity][lane];
}

}  // namespace

float shuffle_xor(float value, int mask, int line) {
  const auto object = static_cast<unsigned>(mask);
  return value_of(m.current->lane ^ object, value, object, line);
}

float shuffle_from(float value, int lane, int line) {
  if (lane < 0 || lane >= static_cast<int>(kWarp)) fault(line, "takes a value from lane %d", lane);
  return value_of(static_cast<unsigned>(lane), value, kWarp, line);  // of no mask
}

// Whole warps come to these.
unsigned warp_index(int line) {
  meet(Wait::kShuffle, line, kWarp + 1);
  return m.current->index / kWarp;
}

bool elected(int line) {
  meet(Wait::kShuffle, line, kWarp + 2);
  return m.current->lane == 0;
}

void warp_barrier(int line) { meet(Wait::kWarpBarrier, line, 0); }

// ---- A CTA ----

void cta_barrier(int line) {
  Thread& self = *m.current;
  Cta& cta = *self.cta;
  // A producer may have ended, and the barrier counts those that have not.
  const auto ended = cta.threads.size() - cta.alive;
  if (ended > cta.producers() || (ended && self.index >= cta.threads.size() - cta.producers()))
    fault(line, "divergent barrier: it waits at a CTA barrier and %zu threads have ended", ended);
  if (!last_at(cta.barrier, cta.threads.size(), cta.alive, Wait::kCtaBarrier, 0, line)) return;
  open_cta_barrier(cta);
  maybe_yield();
}

void open_cta_barrier(Cta& cta) {
  cta.barrier.arrived = 0;
  pass_cta_barrier(cta);
  for (Thread& thread : cta.threads)
    if (&thread != m.current && !thread.done) make_ready(thread);
}

void named_barrier(unsigned id, unsigned threads, int line) {
  Thread& self = *m.current;
  Cta& cta = *self.cta;
  if (id == 0 || id > 15) fault(line, "uses barrier %u: 1 to 15 are free", id);
  if (threads % kWarp) fault(line, "barrier %u is for %u threads, not whole warps", id, threads);
  if (!last_at(cta.named[id], threads, threads, Wait::kNamedBarrier, id, line)) return;
  std::vector<Thread*> there{&self};
  for (Thread& thread : cta.threads)
    if (thread.wait.kind == Wait::kNamedBarrier && thread.wait.object == id)
      there.push_back(&thread);
  Clock learned;
  std::vector<unsigned> counts(cta.threads.back().team + 1);  // of each team
  TeamTimes times;
  for (const Thread* thread : there) {
    learned.join(thread->learned);
    ++counts[thread->team];
    times.raise(thread->team, thread->team_time + 1);
    times.join(thread->others);
  }
  // It orders what whole teams did.
  for (unsigned team = 0; team < counts.size(); ++team)
    if (counts[team] != cta.grid->team_threads && counts[team]) times.below[team] = 0;
  for (Thread* thread : there) {
    thread->learned = learned;
    if (times[thread->team]) pass_team_barrier(*thread, times[thread->team]);
    thread->others.join(times);
    if (thread != &self) make_ready(*thread);
  }
  maybe_yield();
}

// ---- A cluster ----

unsigned cluster_rank() { return m.current->cta->rank; }

void cluster_barrier(int line) {
  Thread& self = *m.current;
  Cluster& cluster = *self.cta->cluster;
  const auto threads = cluster.ctas.size() * self.cta->threads.size();
  if (!last_at(cluster.barrier, threads, threads, Wait::kClusterBarrier, 0, line)) return;
  Clock known;
  known.cta_time.resize(m.launch.grid + m.launch.sum_grid);
  for (Cta* cta : cluster.ctas) {
    pass_cta_barrier(*cta);
    known.join(cta->known);
    known.cta_time[cta->id] = cta->time;
  }
  for (Cta* cta : cluster.ctas) {
    cta->known = known;
    for (Thread& thread : cta->threads)
      if (&thread != &self) make_ready(thread);
  }
  maybe_yield();
}

// Its arrivals are relaxed: it orders initialisations that were fenced before it, and nothing else.
void cluster_barrier_of_inits(int line) {
  Thread& self = *m.current;
  Cluster& cluster = *self.cta->cluster;
  const auto threads = cluster.ctas.size() * self.cta->threads.size();
  if (!last_at(cluster.barrier, threads, threads, Wait::kClusterBarrier, 0, line)) return;
  for (Cta* cta : cluster.ctas) {
    for (Mbarrier& barrier : cta->mbarriers)
      if (barrier.fenced) barrier.init.cta_time = 0;  // before all that anybody does
    for (Thread& thread : cta->threads)
      if (&thread != &self) make_ready(thread);
  }
  maybe_yield();
}

// ---- The grid: counters ----

namespace {

constexpr unsigned kMostIdleLooks = 200;  // more than the patience of any kernel

unsigned index_of(const unsigned* at) {
  return static_cast<unsigned>(at - reinterpret_cast<unsigned*>(m.buffers[kCounters].base));
}

Counter& checked_counter(const unsigned* at, unsigned bytes, const char* verb, int line) {
  checked_buffer(1u << kCounters, at, bytes, verb, line);
  check_aligned(at, bytes, verb, line);
  return m.counters[index_of(at)];
}

void changed(Counter& counter) {
  ++counter.version;
  for (Thread* thread : counter.waiting) make_ready(*thread);
  counter.waiting.clear();
}

void acquire(Thread& thread, const Counter& counter) {
  thread.learned.join(counter.clock);
  thread.acquired = true;
}

void acquire_and_release(Thread& thread, Counter& counter) {
  // Read-modify-writes continue the release sequences of those before them.
  const Clock released = release_clock(thread);
  acquire(thread, counter);
  counter.clock.join(released);
}

// One load. A thread that asks again for what it has just read is in a loop: where `sleeps` says so,
// it sleeps until there is news.
template <typename Sleeps>
void look(const unsigned* at, Counter& counter, bool acquires, Wait::Kind kind, int line,
          Sleeps sleeps) {
  Thread& self = *m.current;
  maybe_yield();
  const auto news = [&] { return self.polled != at || self.polled_version != counter.version; };
  if (!news() && sleeps(self)) {
    counter.waiting.push_back(&self);
    wait_for(kind, line, index_of(at));
  }
  self.idle_looks = news() ? 0 : self.idle_looks + 1;
  self.polled = at;
  self.polled_version = counter.version;
  if (acquires) acquire(self, counter);
}

}  // namespace

unsigned counter_load(const unsigned* at, bool acquires, int line) {
  Counter& counter = checked_counter(at, 4, "reads", line);
  look(at, counter, acquires, Wait::kCounter, line, [](const Thread&) { return true; });
  return *at;
}

void counter_store(unsigned* at, unsigned value, bool release, int line) {
  Counter& counter = checked_counter(at, 4, "stores to", line);
  if (release) maybe_yield();
  *at = value;
  counter.clock = release ? release_clock(*m.current) : Clock{};
  changed(counter);
}

unsigned counter_add_one(unsigned* at, int line) {
  Counter& counter = checked_counter(at, 4, "adds to", line);
  maybe_yield();
  acquire_and_release(*m.current, counter);
  changed(counter);
  return (*at)++;
}

// A thread may look at a ledger a number of times and then do something else. So one that finds it
// unchanged looks on, or sleeps until there is news or nobody else can run.
unsigned long long ledger_read(const unsigned long long* at, bool acquires, int line) {
  const auto* words = reinterpret_cast<const unsigned*>(at);
  Counter& counter = checked_counter(words, 8, "reads", line);
  look(words, counter, acquires, Wait::kLedger, line, [](const Thread& self) {
    return self.idle_looks >= kMostIdleLooks || !m.rng.chance(m.policy.look_percent);
  });
  return *at;
}

unsigned long long ledger_add(unsigned long long* at, unsigned long long entry, bool ordered,
                              int line) {
  Counter& counter = checked_counter(reinterpret_cast<unsigned*>(at), 8, "adds to", line);
  maybe_yield();
  if (ordered) acquire_and_release(*m.current, counter);
  const unsigned long long before = *at;
  *at += entry;
  changed(counter);
  return before;
}

bool wake_looker() {
  for (Cta* cta : m.ctas)
    for (Thread& thread : cta->threads) {
      if (thread.wait.kind != Wait::kLedger || thread.idle_looks >= kMostIdleLooks) continue;
      std::vector<Thread*>& waiting = m.counters[thread.wait.object].waiting;
      waiting.erase(std::find(waiting.begin(), waiting.end(), &thread));
      make_ready(thread);
      return true;
    }
  return false;
}

// ---- Dependent launch ----

void allow_dependents() { m.current->cta->allows_dependents = true; }

void wait_for_primary(int line) {
  if (m.current->cta->grid == &m.main) return;
  if (m.main.finished < m.main.ctas) wait_for(Wait::kPrimary, line);
  m.current->knows_primary = true;
}

}  // namespace normforge
