// Global and shared memory with shadows: who wrote what, who has read it, and what is ordered.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace normforge {

namespace {

// Unmapped distance between buffers: a wild address is nearest to the buffer it was meant for.
constexpr std::size_t kGap = std::size_t{1} << 22;

std::string event_name(const Event& event) {
  if (event.who >= Event::kCta) return "several threads";
  if (event.who >= Event::kTeam)
    return "several threads of team " + std::to_string(event.who - Event::kTeam);
  return "thread " + std::to_string(event.who - 1);
}

unsigned copy_index(const Event& event) {
  return static_cast<unsigned>(event.cta_time);
}

Event by_copy(unsigned copy) { return Event{Event::kCopy, copy, 0}; }

}  // namespace

// ---- Global memory -------------------------------------------------------------------------------

void lay_out_memory() {
  const Launch& l = m.launch;
  const std::size_t row = std::size_t{l.columns} * l.item;
  const std::size_t partials = l.partial_stride ? std::size_t{l.partial_stride} * 4 : 4;
  const auto flat = [](const char* name, std::size_t bytes, unsigned item) {
    return Buffer{name, nullptr, 1, bytes ? bytes : 1, bytes, item};
  };
  m.buffers[kX] = {"x", nullptr, l.rows, std::size_t{l.x_stride} * l.item, row, l.item};
  m.buffers[kDy] = {"dy", nullptr, l.rows, std::size_t{l.dy_stride} * l.item, row, l.item};
  m.buffers[kRstd] = flat("rstd", std::size_t{l.rows} * 4, 4);
  m.buffers[kWeight] = flat("weight", std::size_t{l.columns} * l.weight_item, l.weight_item);
  m.buffers[kDx] = {"dx", nullptr, l.rows, std::size_t{l.dx_stride} * l.item, row, l.item};
  m.buffers[kDw] = flat("dw", std::size_t{l.columns} * l.weight_item, l.weight_item);
  m.buffers[kCounters] = flat("counters", std::size_t{l.counters} * 4, 4);
  m.buffers[kZeroed] = {"zeroed", nullptr, l.zeroed * 4 / partials, partials, partials, 4};
  m.buffers[kScratch] = {"scratch", nullptr, l.scratch * 4 / partials, partials, partials, 4};
  std::size_t total = kGap;
  for (const Buffer& buffer : m.buffers) total += (buffer.extent() + 4095) / 4096 * 4096 + kGap;
  void* arena = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) {
    std::fprintf(stderr, "no memory for buffers of %zu bytes\n", total);
    std::exit(3);
  }
  auto* at = static_cast<unsigned char*>(arena) + kGap;
  for (Buffer& buffer : m.buffers) {
    const bool row_matrix = &buffer == &m.buffers[kX] || &buffer == &m.buffers[kDy] ||
                            &buffer == &m.buffers[kDx];
    buffer.base = at + (row_matrix ? l.misaligned_bytes : 0);
    at += (buffer.extent() + l.misaligned_bytes + 4095) / 4096 * 4096 + kGap;
  }
  m.written[kOutputDx].resize(std::size_t{l.rows} * l.columns);
  m.written[kOutputDw].resize(l.columns);
  m.words[0].resize(l.zeroed);
  m.words[1].resize(l.scratch);
  m.adds.resize(l.zeroed / 4);
  m.counters.resize(l.counters);
}

void reset_memory() {
  for (const BufferId id : {kDx, kDw, kScratch})
    std::memset(m.buffers[id].base, 0xff, m.buffers[id].extent());
  for (const BufferId id : {kCounters, kZeroed})
    std::memset(m.buffers[id].base, 0, m.buffers[id].extent());
  for (auto& written : m.written) std::fill(written.begin(), written.end(), 0);
  Word zero;
  zero.event.who = Event::kInitial;
  std::fill(m.words[0].begin(), m.words[0].end(), zero);
  std::fill(m.words[1].begin(), m.words[1].end(), Word{});
  for (auto& adds : m.adds) adds.clear();
  for (Counter& counter : m.counters) counter = Counter{};
}

std::string place_of(const void* address) {
  const auto* at = static_cast<const unsigned char*>(address);
  const Buffer* nearest = nullptr;
  std::size_t distance = 0;
  for (const Buffer& b : m.buffers) {
    if (b.extent() == 0) continue;
    const unsigned char* end = b.base + b.extent();
    const auto away = static_cast<std::size_t>(at < b.base ? b.base - at : at >= end ? at - end : 0);
    if (nearest == nullptr || away < distance) {
      nearest = &b;
      distance = away;
    }
  }
  if (nearest == nullptr) return "an unknown address";
  const Buffer& b = *nearest;
  if (at < b.base) return std::to_string(b.base - at) + " bytes before " + b.name;
  const auto offset = static_cast<std::size_t>(at - b.base);
  const std::string column = std::to_string(offset % b.pitch / b.item);
  std::string place = b.name;
  if (b.rows > 1 || &b == &m.buffers[kX] || &b == &m.buffers[kDy] || &b == &m.buffers[kDx])
    place += "[" + std::to_string(offset / b.pitch) + ", " + column + "]";
  else
    place += "[" + column + "]";
  if (offset >= b.extent())
    place += ", " + std::to_string(offset - b.extent()) + " bytes past its end";
  return place;
}

Buffer& checked_buffer(unsigned mask, const void* at, std::size_t bytes, const char* verb,
                       int line) {
  for (unsigned id = 0; id < kBuffers; ++id)
    if (mask >> id & 1 && m.buffers[id].holds(at, bytes)) return m.buffers[id];
  std::string allowed;
  for (unsigned id = 0; id < kBuffers; ++id)
    if (mask >> id & 1) allowed += (allowed.empty() ? "" : " or ") + std::string(m.buffers[id].name);
  fault(line, "out of bounds: %s %zu bytes at %s, outside %s", verb, bytes, place_of(at).c_str(),
        allowed.c_str());
  __builtin_unreachable();
}

namespace {

void check_aligned(const void* at, std::size_t bytes, const char* verb, int line) {
  if (reinterpret_cast<std::uintptr_t>(at) % bytes)
    fault(line, "misaligned: %s %zu bytes at %s", verb, bytes, place_of(at).c_str());
}

}  // namespace

void input_read(Input input, const void* from, unsigned bytes, int line) {
  static const unsigned kMasks[] = {1u << kX | 1u << kDy, 1u << kRstd, 1u << kWeight};
  checked_buffer(kMasks[input], from, bytes, "reads", line);
  check_aligned(from, bytes, "reads", line);
}

void output_write(Output output, const void* to, unsigned bytes, int line) {
  const BufferId id = output == kOutputDx ? kDx : kDw;
  const Buffer& b = checked_buffer(1u << id, to, bytes, "writes", line);
  check_aligned(to, bytes, "writes", line);
  const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(to) - b.base);
  unsigned char* written = m.written[output].data() + offset / b.pitch * m.launch.columns +
                           offset % b.pitch / b.item;
  for (unsigned i = 0; i < bytes / b.item; ++i)
    if (written[i]++)
      fault(line, "writes %s a second time",
            place_of(static_cast<const unsigned char*>(to) + i * b.item).c_str());
}

// ---- The workspace -------------------------------------------------------------------------------

namespace {

// The event that made a word what it is; a bulk operation has none before it is published.
Word as_seen(const Word& word) {
  if (word.copy == kUnset) return word;
  const Copy& copy = m.copies[word.copy];
  Word seen = word;
  seen.event = copy.published ? copy.event : Event{Event::kNone, 0, 0};
  seen.release = copy.release;
  return seen;
}

bool knows(const Thread& thread, const Word& word) {
  const Word seen = as_seen(word);
  if (seen.event.who == Event::kInitial) return true;
  if (seen.event.who == Event::kNone) return false;
  if (thread.cta->grid == &m.sum && word.cta < m.launch.grid) return thread.knows_primary;
  if (word.cta == thread.cta->id) return ordered(seen.event, thread);
  return thread.cta->known.knows(seen) || thread.learned.knows(seen);
}

[[noreturn]] void report_race(const Word& word, const float* at, const char* verb, int line) {
  const std::string place = place_of(at);
  const bool sum = word.cta >= m.launch.grid;
  const std::string cta = sum ? "CTA " + std::to_string(word.cta - m.launch.grid) + " of sum_partials"
                              : "CTA " + std::to_string(word.cta);
  if (word.copy != kUnset && !m.copies[word.copy].published)
    fault(line, "race: %s %s, where the %s of %s may not have landed: it was not waited for until "
          "written, or not fenced, before the signal", verb, place.c_str(),
          describe_copy(m.copies[word.copy]).c_str(), cta.c_str());
  fault(line, "race: %s %s, which %s %s wrote, and no barrier and release order the two", verb,
        place.c_str(), cta.c_str(), event_name(as_seen(word).event).c_str());
  __builtin_unreachable();
}

struct Words {
  Word* words;
  std::vector<Word>* adds;  // of the quad, or null
  std::size_t index;
};

Words checked_words(const float* at, unsigned count, const char* verb, int line) {
  const Buffer& b =
      checked_buffer(1u << kZeroed | 1u << kScratch, at, std::size_t{count} * 4, verb, line);
  check_aligned(at, count % 4 ? 4 : 16, verb, line);
  const auto index = static_cast<std::size_t>(at - reinterpret_cast<float*>(b.base));
  const bool zeroed = &b == &m.buffers[kZeroed];
  return {m.words[zeroed ? 0 : 1].data() + index, zeroed ? &m.adds[index / 4] : nullptr, index};
}

void check_adds(const Thread& self, const Words& at, const float* address, const char* verb,
                int line) {
  if (at.adds)
    for (const Word& word : *at.adds)
      if (!knows(self, word)) report_race(word, address, verb, line);
}

}  // namespace

void workspace_read(const float* from, unsigned count, int line) {
  const Thread& self = *m.current;
  const Words at = checked_words(from, count, "reads", line);
  for (unsigned i = 0; i < count; ++i) {
    const Word& word = at.words[i];
    if (word.event.who == Event::kNone && word.copy == kUnset) {
      // Whole float4s are read; what lies behind the last column of a row is never used.
      if ((at.index + i) % m.launch.partial_stride >= m.launch.partial_columns) continue;
      fault(line, "reads %s, which nobody has written", place_of(from + i).c_str());
    }
    if (!knows(self, word)) report_race(word, from + i, "reads", line);
  }
  check_adds(self, at, from, "reads", line);
}

void workspace_write(const float* to, unsigned count, int line) {
  const Thread& self = *m.current;
  const Words at = checked_words(to, count, "writes", line);
  check_adds(self, at, to, "overwrites", line);
  if (at.adds) at.adds->clear();
  for (unsigned i = 0; i < count; ++i) {
    Word& word = at.words[i];
    const bool fresh = word.event.who == Event::kNone && word.copy == kUnset;
    if (!fresh && !knows(self, word)) report_race(word, to + i, "overwrites", line);
    word = Word{self.cta->id, kUnset, self.releases, self.now()};
  }
}

namespace {

// Atomic adds to global memory treat subnormal operands and results as zero (PTX ISA, red).
float flushed(float value) { return __builtin_fabsf(value) < 0x1p-126f ? value * 0.0f : value; }

void add_float(unsigned char* to, const unsigned char* from) {
  float sum, term;
  std::memcpy(&sum, to, 4);
  std::memcpy(&term, from, 4);
  sum = flushed(flushed(sum) + flushed(term));
  std::memcpy(to, &sum, 4);
}

// An add that needs no order to the other adds, only to stores before it.
void note_add(const Words& at, unsigned count, const float* to, const Word& word, int line) {
  for (unsigned i = 0; i < count; ++i) {
    const Word& before = at.words[i];
    if (before.event.who == Event::kNone && before.copy == kUnset)
      fault(line, "adds to %s, which nobody has written", place_of(to + i).c_str());
    if (!knows(*m.current, before)) report_race(before, to + i, "adds to", line);
  }
  if (at.adds == nullptr) fault(line, "adds to %s in no order", place_of(to).c_str());
  at.adds->push_back(word);
}

}  // namespace

void workspace_add(float* to, const float* values, unsigned count, int line) {
  maybe_yield();
  const Thread& self = *m.current;
  const Words at = checked_words(to, count, "adds to", line);
  note_add(at, count, to, Word{self.cta->id, kUnset, self.releases, self.now()}, line);
  for (unsigned i = 0; i < count; ++i)
    add_float(reinterpret_cast<unsigned char*>(to + i),
              reinterpret_cast<const unsigned char*>(values + i));
}

// The destination of a bulk operation of the current thread, from when it is issued on.
void note_workspace_copy(unsigned index, bool add, int line) {
  const Copy& copy = m.copies[index];
  const Thread& self = *m.current;
  auto* to = reinterpret_cast<float*>(copy.to);
  const unsigned count = copy.bytes / 4;
  const Words at = checked_words(to, count, add ? "adds to" : "writes", line);
  const Word mine{self.cta->id, index, self.releases, Event{Event::kNone, 0, 0}};
  bool others = false;
  for (unsigned i = 0; i < count; ++i) {
    const Word& word = at.words[i];
    if (word.event.who != Event::kInitial && word.cta != self.cta->id &&
        (word.event.who != Event::kNone || word.copy != kUnset))
      others = true;
  }
  if (add && !m.launch.ordered_adds) {
    for (unsigned i = 0; i < count; i += 4)
      note_add({at.words + i, at.adds ? at.adds + i / 4 : nullptr, at.index + i}, 4, to + i, mine,
               line);
  } else {
    for (unsigned i = 0; i < count; ++i) {
      Word& word = at.words[i];
      const bool fresh = word.event.who == Event::kNone && word.copy == kUnset;
      const bool padding = (at.index + i) % m.launch.partial_stride >= m.launch.partial_columns;
      if (fresh && add && !padding)
        fault(line, "adds to %s, which nobody has written", place_of(to + i).c_str());
      if (!fresh && !knows(self, word))
        report_race(word, to + i, add ? "adds to" : "overwrites", line);
      word = mine;
    }
  }
  if (others && self.acquired)
    fault(line, "no proxy fence between an acquire and the bulk operation on %s that relies on it",
          place_of(to).c_str());
}

void add_staged(Copy& copy, unsigned from, unsigned bytes) {
  for (unsigned i = from; i < from + bytes; i += 4) add_float(copy.to + i, copy.staged.data() + i);
}

void check_end_state() {
  const Buffer& counters = m.buffers[kCounters];
  for (unsigned i = 0; i < m.launch.counters; ++i) {
    const unsigned value = reinterpret_cast<const unsigned*>(counters.base)[i];
    if (value) return fault(0, "counters[%u] is %u after the call and not 0 again", i, value);
  }
  const Buffer& zeroed = m.buffers[kZeroed];
  for (unsigned i = 0; i < m.launch.zeroed; ++i)
    if (reinterpret_cast<const unsigned*>(zeroed.base)[i])
      return fault(0, "zeroed[%u] is %g after the call and not 0 again", i,
                   static_cast<double>(reinterpret_cast<const float*>(zeroed.base)[i]));
  for (const Output output : {kOutputDx, kOutputDw}) {
    const auto& written = m.written[output];
    const auto missing = std::count(written.begin(), written.end(), 0);
    if (missing == 0) continue;
    const auto first = static_cast<std::size_t>(
        std::find(written.begin(), written.end(), 0) - written.begin());
    const std::size_t row = first / m.launch.columns, column = first % m.launch.columns;
    if (output == kOutputDx)
      return fault(0, "dx[%zu, %zu] was never written, nor %td more elements", row, column,
                   missing - 1);
    return fault(0, "dw[%zu] was never written, nor %td more elements", column, missing - 1);
  }
}

// ---- Shared memory -------------------------------------------------------------------------------

void clear_shared(Cta& cta) {
  std::memset(cta.shared, 0xff, cta.shared_bytes);
  std::fill_n(cta.cells.begin(), cta.shared_bytes / m.launch.granule + 1, Cell{});
}

unsigned char* dynamic_shared() { return m.current->cta->shared; }

void* static_shared(unsigned bytes) {
  Cta& cta = *m.current->cta;
  if (cta.shared_bytes == 0) {
    cta.shared_bytes = bytes;
    clear_shared(cta);
  }
  return cta.shared;
}

namespace {

struct Cells {
  Cell* first;
  unsigned count;
};

Cells checked_cells(Cta& cta, const void* at, unsigned bytes, unsigned alignment, const char* verb,
                    int line) {
  const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(at) - cta.shared);
  if (offset > cta.shared_bytes || offset + bytes > cta.shared_bytes)
    fault(line, "out of bounds: %s %u bytes at byte %td of shared memory, which has %u", verb, bytes,
          static_cast<const unsigned char*>(at) - cta.shared, cta.shared_bytes);
  if (offset % alignment)
    fault(line, "misaligned: %s %u bytes at byte %zu of shared memory", verb, bytes, offset);
  return {&cta.cells[offset / m.launch.granule], std::max(1u, bytes / m.launch.granule)};
}

std::size_t offset_of(const Cta& cta, const Cell* cell) {
  return static_cast<std::size_t>(cell - cta.cells.data()) * m.launch.granule;
}

// Whether the current thread may touch what the copy brought.
bool has_seen(const Copy& copy) {
  const Thread& self = *m.current;
  const Cta& cta = *self.cta;
  if (copy.kind == Copy::kThreadLoad || copy.phase == kUnset) return false;
  if (cta.waited[copy.mbarrier * cta.threads.size() + self.index] > copy.phase) return true;
  const Mbarrier& mbarrier = cta.mbarriers[copy.mbarrier];
  return mbarrier.first_wait_phases > copy.phase && ordered(mbarrier.first_wait, self);
}

[[noreturn]] void report_copy(const Cell& cell, const char* verb, int line) {
  const Cta& cta = *m.current->cta;
  const Copy& copy = m.copies[copy_index(cell.writer)];
  const std::size_t offset = offset_of(cta, &cell);
  if (copy.kind == Copy::kThreadLoad)
    fault(line, "%s byte %zu of shared memory before the wait for the %s that fills it", verb, offset,
          describe_copy(copy).c_str());
  fault(line, "%s byte %zu of shared memory, which belongs to the %s (mbarrier %u): refilled before "
        "this thread had read it, or used before this thread's wait", verb, offset,
        describe_copy(copy).c_str(), copy.mbarrier);
  __builtin_unreachable();
}

// The readers of a granule as one event that is not ordered before anything that one of them is not.
void add_reader(Event& reader, const Thread& self) {
  const Event now = self.now();
  if (reader.who == Event::kNone || reader.cta_time < now.cta_time || reader.who == now.who) {
    reader = now;
    return;
  }
  const bool same_team =
      reader.who < Event::kTeam
          ? self.cta->threads[static_cast<std::size_t>(reader.who - 1)].team == self.team
          : reader.who == Event::kTeam + self.team;
  if (!same_team) {
    reader.who = Event::kCta;
  } else if (reader.team_time < now.team_time) {
    reader = now;
  } else {
    reader.who = Event::kTeam + self.team;
  }
}

void check_overwrite(const Cta& cta, const Cell& cell, const char* what, int line) {
  const Thread& self = *m.current;
  if (cell.writer.who == Event::kCopy) {
    if (!has_seen(m.copies[copy_index(cell.writer)])) report_copy(cell, what, line);
  } else if (cell.writer.who != Event::kNone && !ordered(cell.writer, self)) {
    fault(line, "race: %s byte %zu of shared memory, which %s wrote, and no barrier lies between",
          what, offset_of(cta, &cell), event_name(cell.writer).c_str());
  }
  if (cell.reader.who != Event::kNone && !ordered(cell.reader, self))
    fault(line, "race: %s byte %zu of shared memory, which %s may still have to read: no barrier "
          "lies between", what, offset_of(cta, &cell), event_name(cell.reader).c_str());
}

}  // namespace

namespace {

Cells read_cells(const void* from, unsigned bytes, unsigned alignment, int line) {
  Thread& self = *m.current;
  const Cells cells = checked_cells(*self.cta, from, bytes, alignment, "reads", line);
  for (unsigned i = 0; i < cells.count; ++i) {
    Cell& cell = cells.first[i];
    if (cell.writer.who == Event::kCopy) {
      if (!has_seen(m.copies[copy_index(cell.writer)])) report_copy(cell, "reads", line);
    } else if (cell.writer.who == Event::kNone) {
      fault(line, "reads byte %zu of shared memory, which nobody has written",
            offset_of(*self.cta, &cell));
    } else if (!ordered(cell.writer, self)) {
      fault(line, "race: reads byte %zu of shared memory, which %s wrote, and no barrier lies "
            "between", offset_of(*self.cta, &cell), event_name(cell.writer).c_str());
    }
    add_reader(cell.reader, self);
  }
  return cells;
}

}  // namespace

void shared_read(const void* from, unsigned bytes, int line) {
  read_cells(from, bytes, bytes, line);
}

void shared_write(const void* to, unsigned bytes, int line) {
  Thread& self = *m.current;
  Cta& cta = *self.cta;
  const Cells cells = checked_cells(cta, to, bytes, bytes, "writes", line);
  self.wrote_shared = true;
  if (cta.leaving)
    for (const unsigned index : m.flying) {
      const Copy& copy = m.copies[index];
      const bool reads_here = copy.kind == Copy::kStore || copy.kind == Copy::kAdd;
      const auto* at = static_cast<const unsigned char*>(to);
      if (reads_here && copy.cta == &cta && copy.staged.size() < copy.bytes &&
          at < copy.from + copy.bytes && at + bytes > copy.from)
        fault(line, "overwrites the source of the %s, which is still under way",
              describe_copy(copy).c_str());
    }
  for (unsigned i = 0; i < cells.count; ++i) {
    Cell& cell = cells.first[i];
    check_overwrite(cta, cell, "overwrites", line);
    cell.writer = self.now();
    cell.reader = Event{};
  }
}

// The destination of a copy of the current thread, poisoned from when it is issued on.
void note_shared_copy(Cta& cta, const void* to, unsigned bytes, unsigned copy, int line) {
  const Cells cells = checked_cells(cta, to, bytes, std::min(bytes, 16u), "copies", line);
  const bool local = &cta == m.current->cta;
  for (unsigned i = 0; i < cells.count; ++i) {
    Cell& cell = cells.first[i];
    // What threads of another CTA have read or waited for, this one cannot know of.
    if (local) check_overwrite(cta, cell, "refills", line);
    cell.writer = by_copy(copy);
    cell.reader = Event{};
  }
  std::memset(const_cast<void*>(to), 0xff, bytes);
}

// The current thread has waited for its own cp.async: they count as its writes from now on.
void note_copied(Thread& thread, const void* to, unsigned bytes) {
  const Cells cells = checked_cells(*thread.cta, to, bytes, 1, "copies", 0);
  for (unsigned i = 0; i < cells.count; ++i) cells.first[i].writer = thread.now();
}

void check_bulk_source(const void* from, unsigned bytes, int line) {
  const Thread& self = *m.current;
  const Cells cells = read_cells(from, bytes, 16, line);
  for (unsigned i = 0; i < cells.count; ++i) {
    const unsigned writer = static_cast<unsigned>(cells.first[i].writer.who);
    if (writer != Event::kNone && writer < Event::kTeam &&
        self.cta->threads[writer - 1].wrote_shared)
      fault(line, "no proxy fence: thread %u wrote byte %zu of shared memory, which a bulk operation "
            "reads", writer - 1, offset_of(*self.cta, &cells.first[i]));
  }
}

void fence_async_shared() { m.current->wrote_shared = false; }

}  // namespace normforge
