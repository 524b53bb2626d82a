// Copies that complete later: cp.async, bulk copies and the barriers that count their bytes, bulk
// operations on global memory, stores to other CTAs of a cluster.
//
// A copy starts with a poisoned destination. Pieces of it land when the scheduler says so, between
// any two turns of warps; nothing but the right wait makes them land sooner.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace normforge {

namespace {

constexpr unsigned kPiece = 16;  // bytes that land together at least
constexpr unsigned kMagic = 0x6d626172;

unsigned start(Copy::Kind kind, void* to, const void* from, unsigned bytes, int line) {
  const Thread& self = *m.current;
  m.copies.push_back({kind, self.cta, self.cta->id, self.index, line,
                      static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from),
                      bytes});
  return static_cast<unsigned>(m.copies.size() - 1);
}

void check_bulk_size(const void* global, const void* shared, unsigned bytes, int line) {
  const auto bits = reinterpret_cast<std::uintptr_t>(global) |
                    reinterpret_cast<std::uintptr_t>(shared) | bytes;
  if (bits % 16 || bytes == 0)
    fault(line, "misaligned: a bulk copy of %u bytes at %s; addresses and sizes are multiples of "
          "16", bytes, place_of(global).c_str());
}

// A barrier's 8 bytes hold its index, and a word by which to know it.
unsigned find_mbarrier(Cta& cta, const unsigned long long* barrier, int line) {
  const auto* at = reinterpret_cast<const unsigned char*>(barrier);
  const auto offset = static_cast<std::size_t>(at - cta.shared);
  if (offset >= cta.shared_bytes || offset % 8)
    fault(line, "out of bounds: an mbarrier at byte %td of shared memory, which has %u",
          at - cta.shared, cta.shared_bytes);
  const unsigned index = static_cast<unsigned>(*barrier);
  if (*barrier >> 32 != kMagic || index >= cta.mbarriers.size())
    fault(line, "uses an mbarrier at byte %zu of shared memory that is not initialised", offset);
  const bool remote = &cta != m.current->cta;
  if (remote && !cta.mbarriers[index].fenced)
    fault(line, "race: uses mbarrier %u of another CTA, whose initialisation was not fenced", index);
  if (!remote && !ordered(cta.mbarriers[index].init, *m.current))
    fault(line, "race: uses mbarrier %u, whose initialisation no barrier orders before it", index);
  return index;
}

void complete_if_done(Mbarrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  ++barrier.completed;
  barrier.missing = barrier.arrivals;
  barrier.told.join(barrier.arriving);
  for (Thread* thread : barrier.waiting) make_ready(*thread);
  barrier.waiting.clear();
}

void count_landed(Copy& copy, unsigned bytes) {
  Mbarrier& barrier = copy.target->mbarriers[copy.mbarrier];
  barrier.bytes -= bytes;
  if (copy.landed == copy.bytes) {
    copy.phase = barrier.completed;
    --copy.target->arriving;
  }
  complete_if_done(barrier);
}

void wake_bulk_waiters(const Copy& copy) {
  Thread& thread = copy.cta->threads[copy.thread];
  if (thread.wait.kind == Wait::kBulkRead || thread.wait.kind == Wait::kBulkWritten)
    make_ready(thread);
}

}  // namespace

std::string describe_copy(const Copy& copy) {
  static const char* const kNames[] = {"bulk copy", "cp.async", "bulk store", "bulk add",
                                       "store from the cluster"};
  return std::string(kNames[copy.kind]) + " of thread " + std::to_string(copy.thread) +
         " at line " + std::to_string(copy.line);
}

void land_one() {
  const unsigned pick = m.rng.below(static_cast<unsigned>(m.flying.size()));
  Copy& copy = m.copies[m.flying[pick]];
  const bool to_global = copy.kind == Copy::kStore || copy.kind == Copy::kAdd;
  if (to_global && copy.staged.empty()) {  // the source is read whole, then pieces are written
    copy.staged.assign(copy.from, copy.from + copy.bytes);
    --copy.cta->leaving;
    wake_bulk_waiters(copy);
    return;
  }
  unsigned piece = copy.bytes - copy.landed;
  if (m.rng.chance(50)) piece = std::min(piece, kPiece * (1 + m.rng.below(piece / kPiece + 1)));
  if (copy.kind == Copy::kLoad) check_still_there(copy.from + copy.landed, piece, copy.line);
  if (copy.kind == Copy::kAdd)
    add_staged(copy, copy.landed, piece);
  else
    std::memcpy(copy.to + copy.landed,
                (copy.staged.empty() ? copy.from : copy.staged.data()) + copy.landed, piece);
  copy.landed += piece;
  if (copy.landed == copy.bytes) {
    m.flying[pick] = m.flying.back();
    m.flying.pop_back();
  }
  if (copy.target)
    count_landed(copy, piece);
  else if (copy.landed == copy.bytes && copy.cta->running && copy.cta->id == copy.cta_id)
    wake_bulk_waiters(copy);
}

// ---- cp.async ----

void copy_async(Input input, void* to, const void* from, unsigned bytes, int line) {
  Thread& self = *m.current;
  input_read(input, from, bytes, line);
  if (self.groups.empty()) self.groups.push_back({kUnset, {}});
  CopyGroup& group = self.groups.back();
  if (group.copy == kUnset) group.copy = start(Copy::kThreadLoad, to, from, bytes, line);
  note_shared_copy(*self.cta, to, bytes, group.copy, line);
  group.copies.push_back(
      {static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes});
}

void copy_async_commit() {
  Thread& self = *m.current;
  if (self.groups.empty()) self.groups.push_back({kUnset, {}});
  self.groups.push_back({kUnset, {}});
}

// Nothing but this wait makes a copy readable, so when it lands before makes no difference. Its source
// is read as late as can be.
void copy_async_wait(unsigned pending, int line) {
  Thread& self = *m.current;
  if (self.groups.size() <= pending + 1) return;
  const std::size_t done = self.groups.size() - 1 - pending;
  for (std::size_t i = 0; i < done; ++i)
    for (const PendingCopy& copy : self.groups[i].copies) {
      check_still_there(copy.from, copy.bytes, line);
      std::memcpy(copy.to, copy.from, copy.bytes);
      note_copied(self, copy.to, copy.bytes);
    }
  self.groups.erase(self.groups.begin(), self.groups.begin() + static_cast<std::ptrdiff_t>(done));
}

// ---- Transaction barriers and bulk copies to shared memory ----

void mbarrier_init(unsigned long long* barrier, unsigned arrivals, int line) {
  Thread& self = *m.current;
  Cta& cta = *self.cta;
  shared_write(barrier, 8, line);
  mark_mbarrier(barrier);
  *barrier = static_cast<unsigned long long>(kMagic) << 32 | cta.mbarriers.size();
  Mbarrier state;
  state.arrivals = state.missing = arrivals;
  state.init = self.now();
  cta.mbarriers.push_back(state);
  cta.waited.resize(cta.mbarriers.size() * cta.threads.size());
}

// Of all barriers that the thread has initialised.
void mbarrier_init_fence() {
  for (Mbarrier& barrier : m.current->cta->mbarriers)
    if (barrier.init.who == m.current->index + 1) barrier.fenced = true;
}

void mbarrier_expect(unsigned long long* barrier, unsigned bytes, int line) {
  maybe_yield();
  const Thread& self = *m.current;
  Cta& cta = *self.cta;
  Mbarrier& state = cta.mbarriers[find_mbarrier(cta, barrier, line)];
  if (state.missing == 0) fault(line, "one arrival too many at an mbarrier");
  state.bytes += bytes;
  --state.missing;
  // What barriers order before the arrival. Of its own doings since then, too few are counted.
  state.arriving.join(self.others);
  state.arriving.raise(self.team, self.team_time);
  complete_if_done(state);
}

// One lane hands back what its warp has read of a stage. Loads that are still under way do not wait
// for the arrival, so that every lane has to have fenced between its last one and the warp's barrier.
// That all lanes have read is not checked here: a stage that is refilled too early has other contents.
void mbarrier_arrive(unsigned long long* barrier, int line) {
  maybe_yield();
  const Thread& self = *m.current;
  Cta& cta = *self.cta;
  if (const Thread* reader = self.warp->unfenced)
    fault(line, "no proxy fence: hands a stage back while reads of thread %u may be under way",
          reader->index);
  Mbarrier& state = cta.mbarriers[find_mbarrier(cta, barrier, line)];
  if (state.missing == 0) fault(line, "one arrival too many at an mbarrier");
  --state.missing;
  state.arriving.join(self.others);
  state.arriving.raise(self.team, self.team_time + 1);
  complete_if_done(state);
}

void mbarrier_wait(unsigned long long* barrier, unsigned phase, bool cluster, int line) {
  Thread& self = *m.current;
  Cta& cta = *self.cta;
  maybe_yield();
  const unsigned index = find_mbarrier(cta, barrier, line);
  while (cta.mbarriers[index].completed % 2 == phase) {
    cta.mbarriers[index].waiting.push_back(&self);
    wait_for(Wait::kMbarrier, line, index, phase);
  }
  Mbarrier& state = cta.mbarriers[index];
  cta.waited[index * cta.threads.size() + self.index] = state.completed;
  self.others.join(state.told);
  if (state.first_wait_phases != state.completed) {
    state.first_wait_phases = state.completed;
    state.first_wait = self.now();
  }
  // A phase that counts the sums of a row completes after every warp of the team has sent its own,
  // which it does after its reads of the stage: it stands in for a barrier of the team.
  if (cluster) pass_team_barrier(self, self.team_time + 1);
}

void bulk_load(Input input, void* to, const void* from, unsigned bytes, unsigned long long* barrier,
               int line) {
  maybe_yield();
  Cta& cta = *m.current->cta;
  checked_buffer(1u << (kRows + input), from, bytes, "reads", line);
  check_bulk_size(from, to, bytes, line);
  const unsigned index = find_mbarrier(cta, barrier, line);
  if (!cta.mbarriers[index].fenced)
    fault(line, "no proxy fence: a bulk copy uses mbarrier %u, whose initialisation was not fenced",
          index);
  const unsigned copy = start(Copy::kLoad, to, from, bytes, line);
  note_shared_copy(cta, to, bytes, copy, line);
  m.copies[copy].target = &cta;
  m.copies[copy].mbarrier = index;
  ++cta.arriving;
  m.flying.push_back(copy);
}

// ---- Bulk operations on global memory ----

void bulk_to_global(float* to, const float* from, unsigned bytes, bool add, int line) {
  maybe_yield();
  Thread& self = *m.current;
  check_bulk_size(to, from, bytes, line);
  check_bulk_source(from, bytes, line);
  const unsigned copy = start(add ? Copy::kAdd : Copy::kStore, to, from, bytes, line);
  note_workspace_copy(copy, add, line);
  ++self.cta->leaving;
  self.bulk.push_back(copy);
  m.flying.push_back(copy);
}

void bulk_commit() {
  for (const unsigned copy : m.current->bulk) m.copies[copy].committed = true;
}

void bulk_wait(bool written, int line) {
  Thread& self = *m.current;
  const auto under_way = [&](unsigned index) {
    const Copy& copy = m.copies[index];
    return copy.committed && (written ? copy.landed < copy.bytes : copy.staged.empty());
  };
  while (std::any_of(self.bulk.begin(), self.bulk.end(), under_way))
    wait_for(written ? Wait::kBulkWritten : Wait::kBulkRead, line);
  if (!written) return;
  for (const unsigned copy : self.bulk) m.copies[copy].waited |= m.copies[copy].committed;
}

// Behind the wait and this fence, the landed writes count as the thread's own.
void fence_async_global() {
  Thread& self = *m.current;
  self.acquired = false;
  for (const unsigned index : self.bulk) {
    Copy& copy = m.copies[index];
    if (!copy.waited || copy.published) continue;
    copy.published = true;
    copy.event = self.now();
    copy.release = self.releases;
  }
}

// ---- Stores to other CTAs of the cluster ----

void store_cluster(float* to, float value, unsigned long long* barrier, unsigned rank, int line) {
  maybe_yield();
  Cta& cta = *m.current->cta;
  const auto& ctas = cta.cluster->ctas;
  if (rank >= ctas.size())
    fault(line, "stores to CTA %u of a cluster of %zu", rank, ctas.size());
  Cta& target = *ctas[rank];
  // Its place may have been taken by a CTA of another cluster since.
  if (target.cluster != cta.cluster || !target.running || target.alive == 0)
    fault(line, "stores to shared memory of CTA %u of its cluster, which has ended", rank);
  auto* there = target.shared + (reinterpret_cast<unsigned char*>(to) - cta.shared);
  auto* its_barrier = reinterpret_cast<unsigned long long*>(
      target.shared + (reinterpret_cast<unsigned char*>(barrier) - cta.shared));
  const unsigned index = find_mbarrier(target, its_barrier, line);
  const unsigned copy = start(Copy::kCluster, there, nullptr, 4, line);
  note_shared_copy(target, there, 4, copy, line);
  Copy& started = m.copies[copy];
  started.staged.resize(4);
  std::memcpy(started.staged.data(), &value, 4);
  started.target = &target;
  started.mbarrier = index;
  ++target.arriving;
  m.flying.push_back(copy);
}

}  // namespace normforge
