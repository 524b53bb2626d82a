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

}  // namespace

void lay_out_memory() {
  const Launch& l = m.launch;
  const std::size_t row = std::size_t{l.columns} * l.item;
  const std::size_t partials = l.partial_stride ? std::size_t{l.partial_stride} * 4 : 4;
  const auto flat = [](const char* name, std::size_t bytes, unsigned item) {
    return Buffer{name, nullptr, 1, bytes ? bytes : 1, bytes, item};
  };
  const std::size_t last = l.rows ? l.rows - 1 : 0;
  m.buffers[kX] = {"x", nullptr, stored_row(kX, last) + 1, std::size_t{l.x_stride} * l.item, row,
                   l.item};
  m.buffers[kDy] = {"dy", nullptr, stored_row(kDy, last) + 1, std::size_t{l.dy_stride} * l.item,
                    row, l.item};
  m.buffers[kRstd] = flat("rstd", std::size_t{l.rows} * 4, 4);
  m.buffers[kMean] = flat("mean", l.statistics > 1 ? std::size_t{l.rows} * 4 : 0, 4);
  m.buffers[kWeight] = flat("weight", std::size_t{l.columns} * l.weight_item, l.weight_item);
  m.buffers[kDx] = {"dx", nullptr, l.rows, std::size_t{l.dx_stride} * l.item, row, l.item};
  const std::size_t sums = std::size_t{l.columns} * l.column_sums;
  m.buffers[kDw] = flat("dw", sums * l.dw_item, l.dw_item);
  const std::size_t residual = std::size_t{l.columns} * l.residual_item;
  const unsigned residual_item = l.residual_item ? l.residual_item : 1;
  m.buffers[kDresidual] = {"dresidual", nullptr, l.residual_item ? l.rows : 0, residual + !residual,
                           residual, residual_item};
  m.buffers[kDresidualOut] = {"dresidual_out", nullptr, l.residual_out ? l.rows : 0,
                              (residual + !residual) / l.columns * l.dx_stride, residual,
                              residual_item};
  if (!l.residual_out) m.buffers[kDresidualOut].pitch = 1;
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
  if (l.dx_over_dy) m.buffers[kDx].base = m.buffers[kDy].base;
  const std::size_t elements = std::size_t{l.rows} * l.columns;
  m.written[0].resize(l.no_dx ? 0 : elements);
  m.written[1].resize(l.no_dw ? 0 : sums);
  m.written[2].resize(l.residual_out && !l.no_dx ? elements : 0);
  m.words[0].resize(l.zeroed);
  m.words[1].resize(l.scratch);
  m.adds.resize(l.zeroed / 4);
  m.mail.resize(l.zeroed / 4);
  m.counters.resize(l.counters);
}

std::size_t stored_row(BufferId id, std::size_t row) {
  const unsigned inner = id == kX || id == kDy ? m.launch.inner : 0;
  return inner ? row + row / inner * (id == kX ? 1 : 2) : row;
}

void reset_memory() {
  for (const BufferId id : {kDx, kDw, kDresidualOut, kScratch})
    std::memset(m.buffers[id].base, 0xff, m.buffers[id].extent());
  if (m.launch.dx_over_dy)
    std::memcpy(m.buffers[kDy].base, m.initial_dy.data(), m.initial_dy.size());
  if (!m.initial_dw.empty())
    std::memcpy(m.buffers[kDw].base, m.initial_dw.data(), m.initial_dw.size());
  for (const BufferId id : {kCounters, kZeroed})
    std::memset(m.buffers[id].base, 0, m.buffers[id].extent());
  for (auto& written : m.written) std::fill(written.begin(), written.end(), 0);
  Word zero;
  zero.event.who = Event::kInitial;
  std::fill(m.words[0].begin(), m.words[0].end(), zero);
  std::fill(m.words[1].begin(), m.words[1].end(), Word{});
  for (auto& adds : m.adds) adds.clear();
  for (Mail& mail : m.mail) mail = Mail{};
  for (Counter& counter : m.counters) counter = Counter{};
}

std::string place_of(const void* address) {
  const auto* at = static_cast<const unsigned char*>(address);
  const Buffer* nearest = nullptr;
  std::size_t distance = 0;
  for (const Buffer& b : m.buffers) {
    if (b.extent() == 0) continue;
    const unsigned char* end = b.base + b.extent();
    const auto away =
        static_cast<std::size_t>(at < b.base ? b.base - at : at >= end ? at - end : 0);
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
    if (mask >> id & 1)
      allowed += (allowed.empty() ? "" : " or ") + std::string(m.buffers[id].name);
  fault(line, "out of bounds: %s %zu bytes at %s, outside %s", verb, bytes, place_of(at).c_str(),
        allowed.c_str());
  __builtin_unreachable();
}

void check_aligned(const void* at, std::size_t bytes, const char* verb, int line) {
  if (reinterpret_cast<std::uintptr_t>(at) % bytes)
    fault(line, "misaligned: %s %zu bytes at %s", verb, bytes, place_of(at).c_str());
}

void input_read(Input input, const void* from, unsigned bytes, int line) {
  static const unsigned kMasks[] = {1u << kX | 1u << kDy | 1u << kDresidual,
                                    1u << kRstd | 1u << kMean,
                                    1u << kWeight};
  checked_buffer(kMasks[input], from, bytes, "reads", line);
  check_aligned(from, bytes, "reads", line);
  check_still_dy(from, bytes, line);
}

namespace {

// The marks of what has been written of an output, from an address in it on.
unsigned char* marks_of(unsigned which, const Buffer& b, const void* at) {
  const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(at) - b.base);
  return m.written[which].data() + offset / b.pitch * m.launch.columns + offset % b.pitch / b.item;
}

}  // namespace

void check_still_dy(const void* from, unsigned bytes, int line) {
  const Buffer& b = m.buffers[kDx];
  if (!m.launch.dx_over_dy || !b.holds(from, bytes)) return;
  const unsigned char* written = marks_of(0, b, from);
  for (unsigned i = 0; i < bytes / b.item; ++i)
    if (written[i])
      fault(line, "reads %s, over which dx has been written",
            place_of(static_cast<const unsigned char*>(from) + i * b.item).c_str());
}

void output_write(Output output, const void* to, unsigned bytes, int line) {
  unsigned mask = 0;
  if (output == kOutputDw) mask = m.launch.no_dw ? 0 : 1u << kDw;
  else if (!m.launch.no_dx) mask = 1u << kDx | (m.launch.residual_out ? 1u << kDresidualOut : 0);
  const Buffer& b = checked_buffer(mask, to, bytes, "writes", line);
  check_aligned(to, bytes, "writes", line);
  const unsigned which = &b == &m.buffers[kDx] ? 0 : &b == &m.buffers[kDw] ? 1 : 2;
  unsigned char* written = marks_of(which, b, to);
  for (unsigned i = 0; i < bytes / b.item; ++i)
    if (written[i]++)
      fault(line, "writes %s a second time",
            place_of(static_cast<const unsigned char*>(to) + i * b.item).c_str());
}

void output_read(const void* from, unsigned bytes, int line) {
  checked_buffer(m.launch.dw_mode == 2 ? 1u << kDw : 0, from, bytes, "reads", line);
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
  static const char* const kNames[] = {"dx", "dw", "dresidual_out"};
  for (unsigned which = 0; which < 3; ++which) {
    const auto& written = m.written[which];
    const auto missing = std::count(written.begin(), written.end(), 0);
    if (missing == 0) continue;
    const auto first = static_cast<std::size_t>(
        std::find(written.begin(), written.end(), 0) - written.begin());
    const std::size_t row = first / m.launch.columns, column = first % m.launch.columns;
    if (which != 1)
      return fault(0, "%s[%zu, %zu] was never written, nor %td more elements", kNames[which], row,
                   column, missing - 1);
    return fault(0, "dw[%zu] was never written, nor %td more elements", first, missing - 1);
  }
}

}  // namespace normforge
