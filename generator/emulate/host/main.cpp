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
  const std::map<std::string, unsigned*> fields{
      {"grid", &l.grid}, {"threads", &l.threads}, {"cluster", &l.cluster},
      {"shared_bytes", &l.shared_bytes}, {"team_threads", &l.team_threads},
      {"sum_grid", &l.sum_grid}, {"sum_threads", &l.sum_threads}, {"dependent", &l.dependent},
      {"ordered_adds", &l.ordered_adds}, {"granule", &l.granule}, {"rows", &l.rows},
      {"columns", &l.columns}, {"item", &l.item}, {"weight_item", &l.weight_item},
      {"x_stride", &l.x_stride}, {"dy_stride", &l.dy_stride}, {"dx_stride", &l.dx_stride},
      {"misaligned_bytes", &l.misaligned_bytes}, {"counters", &l.counters},
      {"zeroed", &l.zeroed}, {"scratch", &l.scratch}, {"partial_columns", &l.partial_columns},
      {"partial_stride", &l.partial_stride}, {"group", &l.group},
      {"partials", &l.partials}, {"column_sums", &l.column_sums},
      {"statistics", &l.statistics}, {"no_weight", &l.no_weight}, {"no_dx", &l.no_dx},
      {"no_dw", &l.no_dw}, {"dw_mode", &l.dw_mode}, {"dw_item", &l.dw_item},
      {"weight_offset", &l.weight_offset}, {"residual_item", &l.residual_item},
      {"residual_out", &l.residual_out}, {"inner", &l.inner},
      {"gaps", &l.gaps}, {"dx_over_dy", &l.dx_over_dy}};
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
  const bool packed = id == kX || id == kDy;
  for (std::size_t row = 0; (packed ? stored_row(id, row) : row) < buffer.rows; ++row) {
    const std::size_t at = packed ? stored_row(id, row) : row;
    std::cin.read(reinterpret_cast<char*>(buffer.base + at * buffer.pitch),
                  static_cast<std::streamsize>(buffer.row_bytes));
  }
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
