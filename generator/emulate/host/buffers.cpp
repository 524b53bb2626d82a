// Global memory: where the buffers lie, and what every access to them has to keep to.
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

Buffer words(const char* name, Role role, std::size_t rows, std::size_t columns) {
  Buffer buffer;
  buffer.name = name;
  buffer.role = role;
  buffer.item = 4;
  buffer.rows = rows;
  buffer.columns = columns;
  buffer.pitch = columns ? columns * 4 : 1;
  return buffer;
}

unsigned char* reserve(std::size_t bytes) {
  void* arena = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) {
    std::fprintf(stderr, "no memory for buffers of %zu bytes\n", bytes);
    std::exit(3);
  }
  return static_cast<unsigned char*>(arena);
}

}  // namespace

Buffer& buffer_of(const std::string& name) {
  for (Buffer& buffer : m.buffers)
    if (buffer.name == name) return buffer;
  std::fprintf(stderr, "no buffer is called %s\n", name.c_str());
  std::exit(2);
}

void lay_out_memory() {
  const Launch& l = m.launch;
  const std::size_t partials = l.partial_stride ? l.partial_stride : 1;
  const Buffer workspace[] = {words("counters", kCounters, 1, l.counters),
                              words("zeroed", kZeroed, l.zeroed / partials, partials),
                              words("scratch", kScratch, l.scratch / partials, partials)};
  m.buffers.insert(m.buffers.begin(), std::begin(workspace), std::end(workspace));
  std::size_t total = kGap;
  for (Buffer& b : m.buffers) {
    b.row_bytes = b.columns * b.item;
    b.extent = b.rows ? b.place(b.rows - 1) * b.pitch + b.row_bytes : 0;
    if (b.output()) b.written.resize(b.rows * b.columns);
    total += (b.extent + b.misaligned + 4095) / 4096 * 4096 + kGap;
  }
  unsigned char* at = reserve(total) + kGap;
  for (Buffer& b : m.buffers) {
    b.base = at + b.misaligned;
    at += (b.extent + b.misaligned + 4095) / 4096 * 4096 + kGap;
  }
  for (Buffer& b : m.buffers)
    if (!b.over.empty()) {
      b.base = buffer_of(b.over).base;
      m.overlays.push_back(&b);
    }
  for (const Address& address : m.addresses)
    std::memcpy(&m.arguments[address.at], &buffer_of(address.buffer).base, sizeof(void*));
  m.words[0].resize(l.zeroed);
  m.words[1].resize(l.scratch);
  m.adds.resize(l.zeroed / 4);
  m.mail.resize(l.zeroed / 4);
  m.counters.resize(l.counters);
}

void reset_memory() {
  for (Buffer& b : m.buffers) {
    if (b.output() || b.role == kScratch) std::memset(b.base, 0xff, b.extent);
    if (b.role == kCounters || b.role == kZeroed) std::memset(b.base, 0, b.extent);
    std::fill(b.written.begin(), b.written.end(), 0);
  }
  for (const Buffer& b : m.buffers)
    if (!b.initial.empty()) std::memcpy(b.base, b.initial.data(), b.extent);
  Word zero;
  zero.event.who = Event::kInitial;
  std::fill(m.words[0].begin(), m.words[0].end(), zero);
  std::fill(m.words[1].begin(), m.words[1].end(), Word{});
  for (auto& adds : m.adds) adds.clear();
  for (Mail& mail : m.mail) mail = Mail{};
  for (Counter& counter : m.counters) counter = Counter{};
}

namespace {

std::string place_in(const Buffer& b, const unsigned char* at) {
  if (at < b.base) return std::to_string(b.base - at) + " bytes before " + b.name;
  const auto offset = static_cast<std::size_t>(at - b.base);
  std::string place = b.name + "[";
  if (b.rows > 1 || b.role == kRows || b.role == kRowsOut)
    place += std::to_string(offset / b.pitch) + ", " + std::to_string(offset % b.pitch / b.item);
  else
    place += std::to_string(offset / b.item);
  place += "]";
  if (offset >= b.extent)
    place += ", " + std::to_string(offset - b.extent) + " bytes past its end";
  else if (b.in_gap(offset))
    place += ", between its rows";
  return place;
}

std::string place_in(const Buffer& b, const void* from, std::size_t element) {
  return place_in(b, static_cast<const unsigned char*>(from) + element * b.item);
}

// The marks of what has been written of an output, from an address in it on.
unsigned char* marks_of(Buffer& b, const void* at) {
  const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(at) - b.base);
  return b.written.data() + b.row_at(offset / b.pitch) * b.columns + offset % b.pitch / b.item;
}

}  // namespace

std::string place_of(const void* address) {
  const auto* at = static_cast<const unsigned char*>(address);
  const Buffer* nearest = nullptr;
  std::size_t distance = 0;
  for (const Buffer& b : m.buffers) {
    if (b.extent == 0) continue;
    const unsigned char* end = b.base + b.extent;
    const auto away =
        static_cast<std::size_t>(at < b.base ? b.base - at : at >= end ? at - end : 0);
    if (nearest == nullptr || away < distance) {
      nearest = &b;
      distance = away;
    }
  }
  return nearest ? place_in(*nearest, at) : "an unknown address";
}

namespace {

bool holds_across_rows(const Buffer& b, const void* at, std::size_t bytes) {
  if (!m.launch.across_rows || b.role != kRows || b.inner || b.pitch != b.row_bytes) return false;
  const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(at) - b.base);
  return offset < b.extent && bytes <= b.extent - offset;
}

}  // namespace

Buffer& checked_buffer(unsigned roles, const void* at, std::size_t bytes, const char* verb,
                       int line) {
  for (Buffer& b : m.buffers)
    if (roles >> b.role & 1 && (b.holds(at, bytes) || holds_across_rows(b, at, bytes))) return b;
  std::string allowed;
  for (const Buffer& b : m.buffers)
    if (roles >> b.role & 1) allowed += (allowed.empty() ? "" : " or ") + b.name;
  fault(line, "out of bounds: %s %zu bytes at %s, outside %s", verb, bytes, place_of(at).c_str(),
        allowed.empty() ? "all that it was given" : allowed.c_str());
  __builtin_unreachable();
}

void check_aligned(const void* at, std::size_t bytes, const char* verb, int line) {
  if (reinterpret_cast<std::uintptr_t>(at) % bytes)
    fault(line, "misaligned: %s %zu bytes at %s", verb, bytes, place_of(at).c_str());
}

void check_still_there(const void* from, unsigned bytes, int line) {
  for (Buffer* b : m.overlays) {
    if (!b->holds(from, bytes)) continue;
    const unsigned char* written = marks_of(*b, from);
    for (unsigned i = 0; i < bytes / b->item; ++i)
      if (written[i])
        fault(line, "reads %s, over which %s has been written",
              place_in(buffer_of(b->over), from, i).c_str(), b->name.c_str());
  }
}

void input_read(Input input, const void* from, unsigned bytes, int line) {
  checked_buffer(1u << (kRows + input), from, bytes, "reads", line);
  check_aligned(from, bytes, "reads", line);
  check_still_there(from, bytes, line);
}

void output_write(Output output, const void* to, unsigned bytes, int line) {
  const unsigned roles = output == kOutputRows ? 1u << kRowsOut : 1u << kRowOut | 1u << kSums;
  Buffer& b = checked_buffer(roles, to, bytes, "writes", line);
  check_aligned(to, bytes, "writes", line);
  unsigned char* written = marks_of(b, to);
  for (unsigned i = 0; i < bytes / b.item; ++i)
    if (written[i]++) fault(line, "writes %s a second time", place_in(b, to, i).c_str());
}

void output_read(const void* from, unsigned bytes, int line) {
  const Buffer& b = checked_buffer(1u << kSums, from, bytes, "reads", line);
  if (b.initial.empty())
    fault(line, "reads %s, which it is not to add to", place_of(from).c_str());
  check_aligned(from, bytes, "reads", line);
}

void check_end_state() {
  const Buffer& counters = m.buffers[kCounters];
  for (unsigned i = 0; i < m.launch.counters; ++i) {
    const unsigned value = reinterpret_cast<const unsigned*>(counters.base)[i];
    if (value) return fault(0, "counters[%u] is %u after the call and not 0 again", i, value);
  }
  const Buffer& zeroed = m.buffers[kZeroed];
  for (unsigned i = 0; i < m.launch.zeroed; ++i) {
    const float* word = reinterpret_cast<const float*>(zeroed.base) + i;
    if (*reinterpret_cast<const unsigned*>(word))
      return fault(0, "%s is %g after the call and not 0 again", place_of(word).c_str(),
                   static_cast<double>(*word));
  }
  for (const Buffer& b : m.buffers) {
    const auto missing = std::count(b.written.begin(), b.written.end(), 0);
    if (missing == 0) continue;
    const auto first = static_cast<std::size_t>(
        std::find(b.written.begin(), b.written.end(), 0) - b.written.begin());
    const unsigned char* row = b.base + b.place(first / b.columns) * b.pitch;
    return fault(0, "%s was never written, nor %td more elements",
                 place_in(b, row, first % b.columns).c_str(), missing - 1);
  }
}

}  // namespace normforge
