// Shared memory: every granule knows who wrote it last and who has read it since.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace normforge {

std::string event_name(const Event& event) {
  if (event.who >= Event::kCta) return "several threads";
  if (event.who >= Event::kTeam)
    return "several threads of team " + std::to_string(event.who - Event::kTeam);
  return "thread " + std::to_string(event.who - 1);
}

void clear_shared(Cta& cta) {
  std::memset(cta.shared, 0xff, cta.shared_bytes);
  std::fill_n(cta.cells.begin(), cta.shared_bytes / m.launch.granule + 1, Cell{});
}

unsigned char* dynamic_shared() { return m.current->cta->shared; }

void* static_shared(unsigned bytes) {
  Cta& cta = *m.current->cta;
  if (bytes > kStaticShared) fault(0, "%u bytes of static shared memory", bytes);
  if (cta.shared_bytes == 0) {
    cta.shared_bytes = bytes;
    clear_shared(cta);
  }
  return cta.shared;
}

namespace {

unsigned copy_index(const Event& event) {
  return static_cast<unsigned>(event.cta_time);
}

Event by_copy(unsigned copy) { return Event{Event::kCopy, copy, 0}; }

struct Cells {
  Cell* first;
  unsigned count;
};

Cells checked_cells(Cta& cta, const void* at, unsigned bytes, unsigned alignment, const char* verb,
                    int line) {
  const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(at) - cta.shared);
  if (offset > cta.shared_bytes || offset + bytes > cta.shared_bytes)
    fault(line, "out of bounds: %s %u bytes at byte %td of shared memory, which has %u", verb,
          bytes, static_cast<const unsigned char*>(at) - cta.shared, cta.shared_bytes);
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
    fault(line, "%s byte %zu of shared memory before the wait for the %s that fills it", verb,
          offset, describe_copy(copy).c_str());
  fault(line, "%s byte %zu of shared memory, which belongs to the %s (mbarrier %u): refilled "
        "before this thread had read it, or used before this thread's wait", verb, offset,
        describe_copy(copy).c_str(), copy.mbarrier);
  __builtin_unreachable();
}

// The readers of a granule as one event: it is ordered before nothing that one of them is not.
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

void check_writer(const Cta& cta, const Cell& cell, const char* verb, int line) {
  if (cell.writer.who == Event::kCopy) {
    if (!has_seen(m.copies[copy_index(cell.writer)])) report_copy(cell, verb, line);
  } else if (cell.writer.who != Event::kNone && !ordered(cell.writer, *m.current)) {
    fault(line, "race: %s byte %zu of shared memory, which %s wrote, and no barrier lies between",
          verb, offset_of(cta, &cell), event_name(cell.writer).c_str());
  }
}

void check_no_mbarrier(const Cta& cta, const Cell& cell, const char* what, int line) {
  if (cell.mbarrier)
    fault(line, "%s byte %zu of shared memory, where an mbarrier is", what, offset_of(cta, &cell));
}

void check_overwrite(const Cta& cta, const Cell& cell, const char* what, int line) {
  const Thread& self = *m.current;
  check_no_mbarrier(cta, cell, what, line);
  check_writer(cta, cell, what, line);
  if (cell.reader.who != Event::kNone && !ordered(cell.reader, self))
    fault(line, "race: %s byte %zu of shared memory, which %s may still have to read: no barrier "
          "lies between", what, offset_of(cta, &cell), event_name(cell.reader).c_str());
}

Cells read_cells(const void* from, unsigned bytes, unsigned alignment, int line) {
  Thread& self = *m.current;
  const Cells cells = checked_cells(*self.cta, from, bytes, alignment, "reads", line);
  for (unsigned i = 0; i < cells.count; ++i) {
    Cell& cell = cells.first[i];
    if (cell.writer.who == Event::kNone)
      fault(line, "reads byte %zu of shared memory, which nobody has written",
            offset_of(*self.cta, &cell));
    check_writer(*self.cta, cell, "reads", line);
    if (cell.writer.who == Event::kCopy) self.reads_copied = true;
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

void mark_mbarrier(const void* at) {
  Cta& cta = *m.current->cta;
  const Cells cells = checked_cells(cta, at, 8, 8, "initializes", 0);
  for (unsigned i = 0; i < cells.count; ++i) cells.first[i].mbarrier = true;
}

// The destination of a copy of the current thread, poisoned from when it is issued on.
void note_shared_copy(Cta& cta, const void* to, unsigned bytes, unsigned copy, int line) {
  const Cells cells = checked_cells(cta, to, bytes, std::min(bytes, 16u), "copies", line);
  const bool local = &cta == m.current->cta;
  for (unsigned i = 0; i < cells.count; ++i) {
    Cell& cell = cells.first[i];
    // What threads of another CTA have read or waited for, this one cannot know of.
    if (local) check_overwrite(cta, cell, "refills", line);
    else check_no_mbarrier(cta, cell, "sends to", line);
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
      fault(line, "no proxy fence: thread %u wrote byte %zu of shared memory, which a bulk "
            "operation reads", writer - 1, offset_of(*self.cta, &cells.first[i]));
  }
}

void fence_async_shared() { m.current->wrote_shared = m.current->reads_copied = false; }

}  // namespace normforge
