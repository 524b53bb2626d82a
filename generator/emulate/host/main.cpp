// Runs one launch under many schedules.
//
// stdin:  lines "name value" (the fields of Launch), a line "run seed residency" for every
//         schedule, a line "data", then the rows of x and of dy, rstd, the mean where there
//         is one, weight, the rows of dresidual where there is one, and what dw holds where it is added to, without padding.
// stdout: for every schedule a line "run DX DW RESIDUAL" with the indices of its results among the
//         different ones seen so far, or "fault TEXT"; before that, for every result not seen before,
//         a line "dx BYTES", "dw BYTES" or "dresidual_out BYTES" and the bytes.
// argument: seconds after which it ends, whatever became of the process that should have ended it.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <string>

#include "machine.h"

using namespace normforge;

namespace {

struct Run {
  std::uint64_t seed;
  unsigned residency;
};

[[noreturn]] void refuse(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

std::vector<Run> read_request() {
  Launch& l = m.launch;
#define FIELD(name, value) {#name, &l.name},
  const std::map<std::string, unsigned*> fields{LAUNCH_FIELDS(FIELD)};
#undef FIELD
  std::vector<Run> runs;
  std::string name;
  while (std::cin >> name && name != "data") {
    if (name == "run") {
      Run run{};
      std::cin >> run.seed >> run.residency;
      runs.push_back(run);
      continue;
    }
    const auto field = fields.find(name);
    if (field == fields.end()) refuse("unknown field " + name);
    std::cin >> *field->second;
  }
  if (std::cin.get() != '\n') refuse("no data in the request");
  return runs;
}

void read_rows(BufferId id) {
  Buffer& buffer = m.buffers[id];
  std::memset(buffer.base, 0xff, buffer.extent());
  for (std::size_t row = 0, at; (at = stored_row(id, row)) < buffer.rows; ++row)
    std::cin.read(reinterpret_cast<char*>(buffer.base + at * buffer.pitch),
                  static_cast<std::streamsize>(buffer.row_bytes));
  if (!std::cin) refuse("the request ends inside " + std::string(buffer.name));
}

// The index of the buffer's content among the results seen, which it joins when it is new.
std::size_t find_result(const Buffer& buffer, std::vector<std::string>& seen) {
  std::string content;
  content.reserve(buffer.rows * buffer.row_bytes);
  for (std::size_t row = 0; row < buffer.rows; ++row)
    content.append(reinterpret_cast<const char*>(buffer.base + row * buffer.pitch),
                   buffer.row_bytes);
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i] == content) return i;
  std::printf("%s %zu\n", buffer.name, content.size());
  std::fwrite(content.data(), 1, content.size(), stdout);
  seen.push_back(std::move(content));
  return seen.size() - 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) alarm(static_cast<unsigned>(std::atoi(arguments[1])));
  std::ios::sync_with_stdio(false);
  const std::vector<Run> runs = read_request();
  lay_out_memory();
  for (const BufferId id : {kX, kDy, kRstd, kMean, kWeight})
    if (id != kMean || m.launch.statistics > 1) read_rows(id);
  const Buffer& dy = m.buffers[kDy];
  if (m.launch.dx_over_dy) m.initial_dy.assign(dy.base, dy.base + dy.extent());
  if (m.launch.residual_item) read_rows(kDresidual);
  if (m.launch.dw_mode == 2) {
    m.initial_dw.resize(m.buffers[kDw].row_bytes);
    std::cin.read(reinterpret_cast<char*>(m.initial_dw.data()),
                  static_cast<std::streamsize>(m.initial_dw.size()));
  }
  std::vector<std::string> dx, dw, residual;
  for (const Run& run : runs) {
    run_schedule(run.seed, run.residency);
    if (!m.fault.empty()) {
      std::printf("fault %s\n", m.fault.c_str());
    } else {
      const std::size_t first = find_result(m.buffers[kDx], dx);
      const std::size_t second = find_result(m.buffers[kDw], dw);
      const std::size_t third = find_result(m.buffers[kDresidualOut], residual);
      std::printf("run %zu %zu %zu\n", first, second, third);
    }
    std::fflush(stdout);
  }
  return 0;
}
