// ---- Rows: bulk copies by a warp of their own --------------------------------------------------
// The CTA has one warp more than its teams. One of its lanes asks the copy engine for the rows of all
// teams, stage after stage, as soon as a stage is free. So no thread that computes is held up by
// requests, and a stage is free again once it has been read, not at the end of its batch.
//
// Each stage of a team has two mbarriers. `full` completes a phase when the producer has arrived with
// the number of bytes and these have landed. `empty` completes one when every warp of the team has
// arrived. Both sides count their batches, so that stage i % kStages of batch i is in phase i / kStages.
//
// Why a stage is not read before its bytes are there. A consumer waits for the phase of its batch with
// an acquire at CTA scope. Its completion follows the copies' complete_tx, which makes their writes
// visible to it (PTX ISA, "Async proxy": completion through an mbarrier implies a proxy fence).
//
// Why a stage is not overwritten before it has been read. The producer waits for the empty phase with an
// acquire, before it requests the next copy into the stage. An arrival does not wait for loads of the
// same thread that are still under way: without a fence the copy engine can overwrite what they are to
// read (seen on H100s, in up to 149 of 150 launches where stores press on the queue). So every thread
// that has read executes fence.proxy.async before the warp's barrier. The barrier orders it before the
// arrival of lane 0, whose release the producer's wait acquires; the copy comes after that.
//
// Why nobody waits for ever. The producer fills the stages of all teams in the order in which the teams
// take them, round by round. Take the earliest round and team that some CTA of a cluster cannot finish.
// Its stage was filled, for that waits only until the team has read its batch kStages rounds ago, which
// all CTAs have finished. So each of them has the rows, sends its sums, and receives those of the others.
//
// Why the producer may end first. It has no copies to wait for: those that have not landed are waited for
// by the teams that read them, and a CTA ends with its last thread. Barriers of the CTA after that count
// the threads that have not ended (CUDA C++ Programming Guide, __syncthreads). Before that no thread may
// come to one: the teams' barriers are named, and tails begin after a CTA's last rows have been requested
// and read. The empty phases that nobody waits for any more need no reader.
//
// dx may be the memory of dy, as in rows_bulk.cuh.

struct RowPipeline {
  static_assert(kRowsAbreast == 1, "a bulk copy brings its row to a whole team");
  static constexpr int kBatchBytes = kRowsInFlight * (2 * kRowBytes + kResidualRowBytes);

  const Rows& rows;
  const unsigned warp, team;  // known to be the same for the whole warp
  unsigned char* tiles;  // of the CTA
  unsigned long long *full, *empty;  // of team 0; those of the next team follow
  int stage = 0;
  unsigned phase = 0;

  DEVICE RowPipeline(const Rows& r, unsigned char* smem, unsigned of)
      : rows(r), warp(of), team(of / kWarpsPerRow), tiles(smem + kTilesOffset), full(reinterpret_cast<unsigned long long*>(smem)),
        empty(full + kTeams * kStages) {
    // Unrolled, because in a loop the compiler puts a fence before each of them. The kernel fences them,
    // and a barrier of the CTA or of the cluster publishes them.
    if (threadIdx.x == 0) {
#pragma unroll
      for (int s = 0; s < kTeams * kStages; ++s) {
        mbarrier_init(&full[s], 1);
        mbarrier_init(&empty[s], kWarpsPerRow);
      }
    }
  }
  // Requests all rows of the CTA. For the threads of the last warp, of which one does it.
  DEVICE void produce(long long first, long long step) {
    if (!elected()) return;
    int into = 0;
    unsigned turn = 1;  // of a barrier that has completed no phase the one before counts as complete
#pragma unroll 1
    for (long long batch = first; batch < rows.batches; batch += step) {
#pragma unroll 1
      for (int team = 0; team < kTeams && batch + team < rows.batches; ++team) {
        mbarrier_wait(&empty[team * kStages + into], turn);
        fetch(batch + team, team * kStages + into);
      }
      if (++into == kStages) {
        into = 0;
        turn ^= 1;
      }
    }
  }
  DEVICE void fetch(long long batch, int into) {
    const long long row = row_of_team(batch);
    const long long left = rows.count - row;
    // A batch of one row exists if it is due.
    const int valid = kBatchRows == 1 || left >= kRowsInFlight ? kRowsInFlight : static_cast<int>(left);
    unsigned char* tile = tiles + into * kBatchBytes;
    mbarrier_expect(&full[into], valid * (2 * kRowBytes + kResidualRowBytes));
#pragma unroll 1
    for (int u = 0; u < valid; ++u) {
      bulk_load(tile + u * kRowBytes, rows.x(row + u, rows.first_column), kRowBytes, &full[into]);
      bulk_load(tile + (kRowsInFlight + u) * kRowBytes, rows.dy(row + u, rows.first_column), kRowBytes, &full[into]);
      if constexpr (kResidual)
        bulk_load(tile + 2 * kRowsInFlight * kRowBytes + u * kResidualRowBytes,
                  rows.dresidual(row + u, rows.first_column), kResidualRowBytes, &full[into]);
    }
  }
  DEVICE static long long row_of_team(long long batch) { return batch * kBatchRows; }
  DEVICE void start(const Schedule&) {}
  DEVICE unsigned place() const { return team * kStages + stage; }
  DEVICE void await() { mbarrier_wait(&full[place()], phase); }
  // A batch of one row exists if it is due.
  DEVICE bool exists(long long batch, int u) const {
    return kBatchRows == 1 || row_of(batch, u) < rows.count;
  }
  DEVICE void read(RowPacket (&x)[kRowsInFlight][kVectors],
                   RowPacket (&dy)[kRowsInFlight][kVectors], long long batch) {
    const unsigned char* tile = tiles + place() * kBatchBytes;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const bool valid = exists(batch, u);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        const int at = (column - rows.first_column) * static_cast<int>(sizeof(Element));
        x[u][j] = dy[u][j] = RowPacket{};
        if (valid && rows.owns(j, column)) {
          x[u][j] = load_shared_packet<kVectorBytes>(tile + u * kRowBytes + at);
          dy[u][j] = load_shared_packet<kVectorBytes>(tile + (kRowsInFlight + u) * kRowBytes + at);
        }
      }
    }
  }
  DEVICE void read_residual(ResidualPacket (&residual)[kRowsInFlight][kVectors], long long batch) {
    const unsigned char* tile = tiles + place() * kBatchBytes + 2 * kRowsInFlight * kRowBytes;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const bool valid = exists(batch, u);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        const unsigned char* from =
            tile + u * kResidualRowBytes +
            (column - rows.first_column) * static_cast<int>(sizeof(ResidualElement));
        residual[u][j] = ResidualPacket{};
        if (valid && rows.owns(j, column))
          residual[u][j] = gather_chunks([&](int c) { return from + 16 * c; });
      }
    }
  }
  // Hands the stage back to the producer, after the last read of it.
  DEVICE void release() {
    fence_async_shared();
    warp_barrier();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[place()]);
  }
  DEVICE void refill(const Schedule&) {}
  DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};
