// ---- Rows: cp.async into stages in shared memory ---------------------------------------------
// A thread copies exactly the vectors that it reads, so it only has to wait for its own groups. It
// commits one group per batch, also past the end, so that "all but the newest kAhead - 1" always
// includes the batch that is due.
// A slot is refilled by the thread that read it, and an asynchronous copy follows the earlier
// instructions of its own thread (PTX ISA, asynchronous operations).
// dx may be the memory of dy: a thread writes only elements that it has copied itself, and it has waited
// for those copies. Later reads, also those of a reload, are of the copy.

struct RowPipeline {
  static constexpr int kTileBytes = kVectors * kThreads * kVectorBytes;  // one row of every team
  static constexpr int kResidualTileBytes = kResidual * kVectors * kThreads * kResidualBytes;
  static constexpr int kStageBytes = kRowsInFlight * (2 * kTileBytes + kResidualTileBytes);
  static constexpr int kAhead = kStages - kReload;

  const Rows& rows;
  unsigned char* const first;  // this thread's first vector in the first stage
  unsigned char* due;          // and in the stage of the batch that is due

  DEVICE RowPipeline(const Rows& r, unsigned char* smem)
      : rows(r), first(smem + kTilesOffset + threadIdx.x * kVectorBytes), due(first) {}

  // Vectors of consecutive threads are neighbours: no bank conflicts.
  DEVICE static unsigned char* slot(unsigned char* stage, int tensor, int u, int j) {
    return stage + (tensor * kRowsInFlight + u) * kTileBytes + j * kThreads * kVectorBytes;
  }
  DEVICE static unsigned char* residual_slot(unsigned char* stage, int u, int j, int chunk) {
    constexpr int kChunk = kChunkOf<kResidualBytes>;
    // `stage` already has threadIdx.x * kVectorBytes in it, hence the difference at the end.
    return stage + 2 * kRowsInFlight * kTileBytes + u * kResidualTileBytes +
           (j * (kResidualBytes / kChunk) + chunk) * kThreads * kChunk +
           static_cast<int>(threadIdx.x) * (kChunk - kVectorBytes);
  }
  DEVICE void fetch(long long batch, unsigned char* into) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = row_of(batch, u);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        if (row < rows.count && rows.owns(j, column)) {
          copy_async<kVectorBytes>(slot(into, 0, u, j), rows.x(row, column));
          copy_async<kVectorBytes>(slot(into, 1, u, j), rows.dy(row, column));
          if constexpr (kResidual) {
            constexpr int kChunk = kChunkOf<kResidualBytes>;
            constexpr int kStep = kChunk / static_cast<int>(sizeof(ResidualElement));
#pragma unroll
            for (int c = 0; c < kResidualBytes / kChunk; ++c)
              copy_async<kChunk>(residual_slot(into, u, j, c),
                                 rows.dresidual(row, column) + c * kStep);
          }
        }
      }
    }
    copy_async_commit();
  }
  // The address is advanced here, too. If NVRTC 13.0 splits the address of a copy with a cache policy
  // into a thread's register and a uniform one, it emits an illegal instruction.
  DEVICE void start(const Schedule& schedule) {
    unsigned char* into = first;
#pragma unroll 1
    for (int s = 0; s < kAhead; ++s, into += kStageBytes) fetch(schedule.ahead(s), into);
  }
  DEVICE void await() { copy_async_wait<kAhead - 1>(); }
  DEVICE void read(RowPacket (&x)[kRowsInFlight][kVectors],
                   RowPacket (&dy)[kRowsInFlight][kVectors], long long batch) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const bool valid = row_of(batch, u) < rows.count;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        x[u][j] = dy[u][j] = RowPacket{};
        if (valid && rows.owns(j, rows.column(j))) {
          x[u][j] = load_shared_packet<kVectorBytes>(slot(due, 0, u, j));
          dy[u][j] = load_shared_packet<kVectorBytes>(slot(due, 1, u, j));
        }
      }
    }
  }
  DEVICE void read_residual(ResidualPacket (&residual)[kRowsInFlight][kVectors], long long batch) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const bool valid = row_of(batch, u) < rows.count;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        residual[u][j] = ResidualPacket{};
        if (valid && rows.owns(j, rows.column(j)))
          residual[u][j] =
              gather_chunks([&](int c) { return residual_slot(due, u, j, c); });
      }
    }
  }
  DEVICE unsigned char* last() const { return first + (kStages - 1) * kStageBytes; }
  // With a reload, the stage of this batch is still needed, so the one before it is refilled.
  DEVICE void refill(const Schedule& schedule) {
    fetch(schedule.ahead(kAhead), !kReload ? due : due == first ? last() : due - kStageBytes);
  }
  DEVICE void advance() { due = due == last() ? first : due + kStageBytes; }
};
