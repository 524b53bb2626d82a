// Runs one launch under many schedules.
//
// stdin:  lines, in any order but for those of buffers:
//           NAME VALUE                     a field of Launch
//           buffer NAME ROLE ITEM ROWS COLUMNS PITCH INNER GAP MISALIGNED OVER DATA
//                                          a tensor; one that is not there has no line. ROLE: a name
//                                          of kRoles below; ITEM: bytes of an element; PITCH: elements
//                                          between rows; GAP: rows behind every INNER ones, which are
//                                          nobody's; MISALIGNED: bytes from an aligned address; OVER:
//                                          the input in whose memory an output lies, row on row, or -;
//                                          DATA: 1 where its elements follow
//           address AT NAME                the base of a buffer (also: counters, zeroed, scratch)
//                                          stands AT so many bytes in the block of arguments
//           second AT                      of every parameter of sum_partials, in their order
//           run SEED RESIDENCY             a schedule
//           arguments BYTES                the last line
//         then the block of arguments, in which addresses that no line names stay as they are, and
//         the elements of all buffers with DATA, without padding. Outputs with DATA are added to.
// stdout: for every schedule a line "run" with an index for each output, in the order of their lines:
//         that of its result among the different ones seen so far; or "fault TEXT". Before that, for
//         every result not seen before, a line "result NAME BYTES" and the bytes.
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

const char* const kRoleNames[kRoles] = {"counters", "zeroed",  "scratch",   // no buffer line has these
                                        "rows",     "row",     "columns",
                                        "rows_out", "row_out", "sums"};

struct Run {
  std::uint64_t seed;
  unsigned residency;
};

[[noreturn]] void refuse(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

Buffer read_buffer() {
  Buffer buffer;
  std::string role;
  std::cin >> buffer.name >> role >> buffer.item >> buffer.rows >> buffer.columns >> buffer.pitch >>
      buffer.inner >> buffer.gap >> buffer.misaligned >> buffer.over >> buffer.given;
  unsigned found = kRows;
  while (found < kRoles && role != kRoleNames[found]) ++found;
  if (!std::cin || found == kRoles) refuse("no tensor: " + buffer.name + " " + role);
  buffer.role = static_cast<Role>(found);
  buffer.pitch *= buffer.item;
  if (buffer.over == "-") buffer.over.clear();
  return buffer;
}

std::vector<Run> read_request() {
  Launch& l = m.launch;
#define FIELD(name, value) {#name, &l.name},
  const std::map<std::string, unsigned*> fields{LAUNCH_FIELDS(FIELD)};
#undef FIELD
  std::vector<Run> runs;
  std::string name;
  while (std::cin >> name && name != "arguments") {
    if (name == "run") {
      Run run{};
      std::cin >> run.seed >> run.residency;
      runs.push_back(run);
    } else if (name == "buffer") {
      m.buffers.push_back(read_buffer());
    } else if (name == "address") {
      Address address{};
      std::cin >> address.at >> address.buffer;
      m.addresses.push_back(address);
    } else if (name == "second") {
      std::cin >> m.second.emplace_back();
    } else if (const auto field = fields.find(name); field != fields.end()) {
      std::cin >> *field->second;
    } else {
      refuse("unknown field " + name);
    }
  }
  std::size_t bytes = 0;
  std::cin >> bytes;
  if (std::cin.get() != '\n') refuse("no arguments in the request");
  m.arguments.resize(bytes);
  std::cin.read(reinterpret_cast<char*>(m.arguments.data()), static_cast<std::streamsize>(bytes));
  return runs;
}

// Whether a launch changes what it finds in a buffer.
bool is_changed(const Buffer& buffer) {
  bool changed = buffer.output();
  for (const Buffer* output : m.overlays) changed |= output->over == buffer.name;
  return changed;
}

void read_content(Buffer& buffer) {
  std::memset(buffer.base, 0xff, buffer.extent);
  for (std::size_t row = 0; row < buffer.rows; ++row)
    std::cin.read(reinterpret_cast<char*>(buffer.base + buffer.place(row) * buffer.pitch),
                  static_cast<std::streamsize>(buffer.row_bytes));
  if (!std::cin) refuse("the request ends inside " + buffer.name);
  if (is_changed(buffer)) buffer.initial.assign(buffer.base, buffer.base + buffer.extent);
}

// The index of the buffer's content among the results seen, which it joins when it is new.
std::size_t find_result(const Buffer& buffer, std::vector<std::string>& seen) {
  std::string content;
  content.reserve(buffer.rows * buffer.row_bytes);
  for (std::size_t row = 0; row < buffer.rows; ++row)
    content.append(reinterpret_cast<const char*>(buffer.base + buffer.place(row) * buffer.pitch),
                   buffer.row_bytes);
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i] == content) return i;
  std::printf("result %s %zu\n", buffer.name.c_str(), content.size());
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
  for (Buffer& buffer : m.buffers)
    if (buffer.given) read_content(buffer);
  std::map<std::string, std::vector<std::string>> seen;
  for (const Run& run : runs) {
    run_schedule(run.seed, run.residency);
    if (!m.fault.empty()) {
      std::printf("fault %s\n", m.fault.c_str());
    } else {
      std::string indices;
      for (const Buffer& buffer : m.buffers)
        if (buffer.output())
          indices += " " + std::to_string(find_result(buffer, seen[buffer.name]));
      std::printf("run%s\n", indices.c_str());
    }
    std::fflush(stdout);
  }
  return 0;
}
