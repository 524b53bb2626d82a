// The state of the emulated GPU while one launch runs under one schedule.
//
// All threads are fibers of one host thread; nothing here is shared between host threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"
#include "host_api.h"

namespace normforge {

constexpr unsigned kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr unsigned kUnset = 0xffffffffu;
constexpr unsigned kStaticShared = 49152;  // bytes, the most that a kernel may declare

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
struct Rng {
  std::uint64_t state;

  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  unsigned below(unsigned count) {
    return static_cast<unsigned>((next() >> 32) * count >> 32);
  }
  bool chance(unsigned percent) { return percent >= 100 || (percent > 0 && below(100) < percent); }
};

// How the seed shapes one schedule; every field is drawn anew for every seed.
struct Policy {
  enum Pick { kAny, kPriority, kSameCta, kStarve } pick;
  enum Lanes { kAscending, kDescending, kRotated } lanes;
  unsigned land_percent;   // before a turn, that a piece of a copy lands
  unsigned yield_percent;  // that a thread yields before an operation other CTAs can see
  unsigned break_percent;  // that a warp's turn ends at a shuffle
  unsigned start_percent;  // before a turn, that a waiting CTA starts
  unsigned hide_percent;   // that words which nothing orders have not arrived for a thread yet
  unsigned look_percent;   // that a thread which finds a ledger unchanged looks on
  bool shuffled_ctas;      // CTAs start in a random order, not by index
};

// ---- What is ordered before what ---------------------------------------------------------------
// A point in the life of a thread as its barriers see it. Everything that a thread of the CTA did
// before its CTA barrier number n has cta_time <= n and is ordered before whatever a thread
// does after it; team_time is the same for the barriers of one team (the threads that share a row).
struct Event {
  static constexpr unsigned kNone = 0, kTeam = 0x2000, kCta = 0x4000, kInitial = 0x6000,
                            kCopy = 0x8000;
  std::uint64_t who : 16;  // thread + 1, or one of the above (kTeam + team: several of its threads)
  std::uint64_t cta_time : 24;
  std::uint64_t team_time : 24;
};
static_assert(sizeof(Event) == 8, "cells of the shadow memory stay small");

// Events of team t with a team_time below the t-th of these are known.
struct TeamTimes {
  std::vector<unsigned> below;

  unsigned operator[](unsigned team) const { return team < below.size() ? below[team] : 0; }
  void raise(unsigned team, unsigned time) {
    if (team >= below.size()) below.resize(team + 1);
    if (below[team] < time) below[team] = time;
  }
  void join(const TeamTimes& more) {
    for (unsigned team = 0; team < more.below.size(); ++team) raise(team, more.below[team]);
  }
};

// The last write and the last reads of a granule of shared memory.
struct Cell {
  Event writer;  // who == kCopy: an asynchronous copy, whose index the times hold
  Event reader;
  bool mbarrier = false;  // of one: nothing else may write there
};

// The last write of a word of the workspace.
struct Word {
  unsigned cta = 0;
  unsigned copy = kUnset;  // a bulk operation: its event counts once it has been published
  unsigned release = 0;    // releases that the thread had made before
  Event event{Event::kNone, 0, 0};

  bool fresh() const { return event.who == Event::kNone && copy == kUnset; }  // never written
};

// What a thread or CTA knows to have happened in other CTAs.
struct Clock {
  struct Own {  // a thread's own doings up to its release, which no barrier has collected yet
    unsigned cta, thread, release;
  };
  std::vector<unsigned> cta_time;  // events with an earlier cta_time are known, by CTA
  std::vector<Own> own;

  void join(const Clock& other);
  bool knows(const Word& word) const;
  bool empty() const { return cta_time.empty(); }
};

// ---- Threads -----------------------------------------------------------------------------------

struct Wait {
  enum Kind {
    kNothing, kShuffle, kWarpBarrier, kCtaBarrier, kNamedBarrier, kClusterBarrier, kMbarrier,
    kCounter, kLedger, kMail, kBulkRead, kBulkWritten, kPrimary
  } kind = kNothing;
  int line = 0;
  unsigned object = 0;  // id of the barrier, index of the mbarrier, of the counter, ledger or words
  unsigned phase = 0;
};

struct PendingCopy {  // cp.async
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes;
};
struct CopyGroup {
  unsigned copy;  // index of its Copy, or kUnset for an empty group
  std::vector<PendingCopy> copies;
};

struct Cta;
struct Warp;

struct Thread {
  Fiber fiber;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  unsigned index = 0, lane = 0, team = 0;
  unsigned team_time = 1;
  TeamTimes others;  // what other teams did, as far as an mbarrier has told this thread
  unsigned releases = 0;
  bool done = false;
  bool wrote_shared = false;    // since its last fence_async_shared
  bool reads_copied = false;    // since then: of what a bulk copy brought, perhaps still under way
  bool acquired = false;        // since its last fence_async_global
  bool knows_primary = false;   // everything that the first kernel did
  Wait wait;
  const unsigned* polled = nullptr;  // the counter of its last load, and the version read
  unsigned polled_version = 0;
  unsigned idle_looks = 0;            // at a ledger, since it last changed
  Clock learned;                      // by acquire, since the last barrier
  std::vector<unsigned> bulk;         // its bulk operations to global memory
  std::vector<CopyGroup> groups;      // cp.async, oldest first; the last one is open

  Event now() const;
};

struct Warp {
  Cta* cta = nullptr;
  Thread* threads = nullptr;  // 32 of them
  unsigned ready = 0;         // lanes that can run
  unsigned turn = 0;          // lanes that may still run in the turn under way
  unsigned priority = 0;
  int place = -1;             // in Machine::ready
  Wait meeting;               // the shuffle or warp barrier that `arrived` lanes have reached
  unsigned arrived = 0;
  unsigned parity = 0;
  Thread* unfenced = nullptr;  // with reads of copied bytes perhaps under way at the last barrier
  float values[2][kWarp];
};

struct Barrier {
  unsigned arrived = 0, threads = 0, first = 0;
  int line = 0;
};

struct Mbarrier {
  unsigned arrivals = 0, missing = 0, completed = 0;
  long long bytes = 0;       // still to come in this phase
  TeamTimes arriving, told;  // by arrivals of this phase; by those of phases that have completed
  Event init{};
  bool fenced = false;       // its initialisation
  Event first_wait{};        // the first thread that saw the newest completed phase, and when
  unsigned first_wait_phases = 0;
  std::vector<Thread*> waiting;
};

struct Grid;

struct Cluster {
  std::vector<Cta*> ctas;
  Barrier barrier;
};

struct Cta {
  Grid* grid = nullptr;
  Cluster* cluster = nullptr;
  unsigned id = 0;     // unique in the launch, over both grids
  unsigned block = 0;  // blockIdx.x
  unsigned rank = 0;
  unsigned alive = 0;
  unsigned time = 1;
  bool running = false;
  bool allows_dependents = false;
  unsigned arriving = 0;       // asynchronous copies into its shared memory under way
  unsigned leaving = 0;        // bulk operations that still read its shared memory
  unsigned char* stacks = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned char> memory;
  unsigned char* shared = nullptr;
  unsigned shared_bytes = 0;
  std::vector<Cell> cells;
  Barrier barrier;
  Barrier named[16];
  std::vector<Mbarrier> mbarriers;
  unsigned producers() const;  // threads of the last warp, if it only asks for rows
  std::vector<unsigned> waited;  // [mbarrier * threads + thread]: phases that the thread has seen
  Clock known;
};

inline Event Thread::now() const { return Event{index + 1, cta->time, team_time}; }

// Whether barriers order what happened before what the thread does now, both in its CTA.
inline bool ordered(const Event& before, const Thread& now) {
  if (before.cta_time < now.cta->time || before.who == now.index + 1) return true;
  if (before.who >= Event::kCta) return false;
  const unsigned team = before.who < Event::kTeam
                            ? now.cta->threads[static_cast<std::size_t>(before.who - 1)].team
                            : static_cast<unsigned>(before.who) - Event::kTeam;
  return before.team_time < (team == now.team ? now.team_time : now.others[team]);
}

struct Grid {
  const char* kernel = "";
  unsigned ctas = 0, threads = 0, shared_bytes = 0, cluster = 1, team_threads = 0;
  bool producer = false;
  unsigned first_id = 0, started = 0, finished = 0;
  std::vector<unsigned> order;  // of clusters
};

inline unsigned Cta::producers() const { return grid->producer ? kWarp : 0; }

// ---- Memory ------------------------------------------------------------------------------------

// What a buffer of a launch is for, and what may be done there.
enum Role {
  kCounters, kZeroed, kScratch,  // the workspace, which Machine::buffers begins with
  kRows, kRow, kColumns,         // read: matrices, a number of each row, of each column
  kRowsOut, kRowOut, kSums,      // written once: the same, and sums over the rows
  kRoles
};

struct Buffer {
  std::string name;
  Role role = kRows;
  unsigned item = 1;                           // bytes of an element
  std::size_t rows = 0, columns = 0;
  std::size_t pitch = 1, row_bytes = 0;        // bytes between rows, and those that count
  std::size_t inner = 0, gap = 0;              // behind every `inner` rows is a gap of `gap` rows
  std::size_t misaligned = 0;                  // bytes from an aligned address to the first element
  std::string over;                            // of an output: the input whose memory it has, or ""
  bool given = false;                          // whether the request has its elements
  unsigned char* base = nullptr;
  std::size_t extent = 0;                      // bytes from the first element to the last one's end
  std::vector<unsigned char> written;          // of an output: one byte per element
  std::vector<unsigned char> initial;          // what a launch finds there, where it changes that

  bool output() const { return role >= kRowsOut; }
  std::size_t place(std::size_t row) const { return inner ? row + row / inner * gap : row; }
  std::size_t row_at(std::size_t place) const {
    return inner ? place - place / (inner + gap) * gap : place;
  }
  bool in_gap(std::size_t offset) const {
    return inner && offset / pitch % (inner + gap) >= inner;
  }
  bool holds(const void* at, std::size_t bytes) const {
    const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(at) - base);
    return offset < extent && offset % pitch + bytes <= row_bytes && !in_gap(offset);
  }
};

// An asynchronous copy, on its way until it has landed whole.
struct Copy {
  enum Kind { kLoad, kThreadLoad, kStore, kAdd, kCluster } kind;
  Cta* cta;  // whose thread asked for it
  unsigned cta_id, thread;
  int line;
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes;
  unsigned landed = 0;
  Cta* target = nullptr;      // whose shared memory it fills
  unsigned mbarrier = 0, phase = kUnset;  // the phase that it was counted on, once landed
  std::vector<unsigned char> staged;      // to global memory: what was read from shared memory
  bool committed = false, waited = false, published = false;
  Event event{};              // when published
  unsigned release = 0;
};

struct Counter {
  unsigned version = 0;
  Clock clock;  // what a thread that acquires it learns
  std::vector<Thread*> waiting;
};

// Four words of `zeroed` that are sent in this launch: 0 is an empty place. Masks have a bit for
// every word.
struct Mail {
  struct Look {  // what a thread has been shown at its last look, and what it has received
    unsigned cta, thread, version, shown, received;
  };
  bool sent = false;  // or on its way
  unsigned version = 0;
  std::vector<Look> looks;
  std::vector<Thread*> waiting;
};

// The numbers of one launch, as normforge/spec.py computes them. producer: whether the last warp of a
// CTA only asks for rows, and may end before the others come to a barrier. across_rows: whether reads
// may bring elements of neighbouring rows, too, where rows lie one behind the other.
#define LAUNCH_FIELDS(F)                                                                          \
  F(grid, 0) F(threads, 0) F(cluster, 1) F(shared_bytes, 0) F(team_threads, 0) F(sum_grid, 0)     \
  F(sum_threads, 0) F(dependent, 0) F(ordered_adds, 0) F(granule, 4) F(counters, 0) F(zeroed, 0)  \
  F(scratch, 0) F(partial_columns, 0) F(partial_stride, 0) F(producer, 0) F(across_rows, 0)
struct Launch {
#define FIELD(name, value) unsigned name = value;
  LAUNCH_FIELDS(FIELD)
#undef FIELD
};

// An address in the block of arguments: the base of the buffer of that name.
struct Address {
  std::size_t at;
  std::string buffer;
};

// What every schedule begins anew.
struct State {
  Rng rng{0};
  Policy policy{};
  unsigned residency = 0, resident = 0;
  Grid main, sum;
  std::vector<Cta*> ctas;   // running now
  std::vector<Warp*> ready;
  std::vector<Copy> copies;
  std::vector<unsigned> flying;  // indices of copies that land by themselves
  Thread* current = nullptr;     // null while the scheduler runs
  Warp* turn = nullptr;
  unsigned last_cta = 0, starved = 0;
  unsigned long long steps = 0;
  std::string fault;             // the first one ends the schedule
};

struct Machine : State {
  Launch launch;
  std::vector<Buffer> buffers;
  std::vector<Buffer*> overlays;          // outputs that lie over inputs
  std::vector<unsigned char> arguments;   // of both kernels, as they lie in memory
  std::vector<Address> addresses;
  std::vector<std::size_t> second;        // where the parameters of the second kernel lie
  std::vector<Word> words[2];             // zeroed, scratch
  std::vector<std::vector<Word>> adds;    // unordered adds to the quads of `zeroed` since a store
  std::vector<Mail> mail;                 // by quad of `zeroed`
  std::vector<Counter> counters;
  Fiber scheduler;
};
extern Machine m;

// ---- Between the files -------------------------------------------------------------------------

// Ends the schedule with a sentence about the current thread. From a thread it does not return;
// from the scheduler it does.
[[gnu::format(printf, 2, 3)]] void fault(int line, const char* format, ...);
std::string thread_name(const Cta& cta, unsigned thread);
std::string place_of(const void* address);  // "x[3, 17]" or where it is beside a buffer

// buffers.cpp
void lay_out_memory();   // once
void reset_memory();     // before every schedule
void check_end_state();  // after it
Buffer& buffer_of(const std::string& name);
// roles: bits of Role, or'ed.
Buffer& checked_buffer(unsigned roles, const void* at, std::size_t bytes, const char* verb,
                       int line);
void check_aligned(const void* at, std::size_t bytes, const char* verb, int line);
// Reads of an input, at the time when a copy makes them: of what no output has been written over.
void check_still_there(const void* from, unsigned bytes, int line);

// workspace.cpp
void note_workspace_copy(unsigned copy, bool add, int line);
void add_staged(Copy& copy, unsigned from, unsigned bytes);

// shared.cpp
void clear_shared(Cta& cta);
void note_shared_copy(Cta& cta, const void* to, unsigned bytes, unsigned copy, int line);
void note_copied(Thread& thread, const void* to, unsigned bytes);
void mark_mbarrier(const void* at);
void check_bulk_source(const void* from, unsigned bytes, int line);
std::string event_name(const Event& event);

// threads.cpp
void end_all_ctas();
void start_cluster(Grid& grid);  // the next one in the grid's order
void run_turn(Warp& warp);       // until every lane that was ready waits or yields
void make_ready(Thread& thread);
bool wake_looker();  // one that could look on at a ledger; false: there is none
void wait_for(Wait::Kind kind, int line, unsigned object = 0, unsigned phase = 0);
void maybe_yield();

// schedule.cpp
std::string describe_wait(const Wait& wait);
void run_schedule(std::uint64_t seed, unsigned residency);

// barriers.cpp
void pass_team_barrier(Thread& thread, unsigned time);
void open_cta_barrier(Cta& cta);  // all that have not ended have come

// copies.cpp
void land_one();  // a piece of a copy on its way
std::string describe_copy(const Copy& copy);

}  // namespace normforge
