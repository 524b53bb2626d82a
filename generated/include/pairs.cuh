// ---- Pairs of columns ---------------------------------------------------------------------------
// Columns i and i + N / 2 are a pair. A vector lies in one half of its row, so its partner is a vector.
//
// Where a thread has evenly many vectors, and no thread idles, it has their partners itself. Where it has
// one, and the row lies in a warp, the partner is one shuffle away. Otherwise it is read a second time,
// from global memory: the row has been asked for just before, so a cache has it.
// Memory ordering. Nothing but registers is exchanged, and what is read a second time is an input that
// nobody writes: an output may not be the memory of a tensor that is read in pairs.

constexpr int kHalf = kRowColumns / 2;
static_assert(kExact && kRowColumns % (2 * kElements) == 0, "a vector lies in one half of its row");
constexpr bool kNoneIdle = kCluster == 1 && kVectors * kThreadsPerRow * kElements == kRowColumns;
constexpr bool kOwnPartners = kNoneIdle && kVectors % 2 == 0;
constexpr bool kPartnersInWarp = kNoneIdle && kVectors == 1 && kThreadsPerRow <= 32;

DEVICE int partner_of(int column) { return column < kHalf ? column + kHalf : column - kHalf; }

// The partners of all vectors of a batch; `at` is where a tensor has a row and column. All lanes of a
// warp come here together: teams are whole warps, and all their threads go through every batch.
DEVICE void read_partners(RowPacket (&into)[kRowsInFlight][kVectors],
                          const RowPacket (&own)[kRowsInFlight][kVectors], const Rows& rows,
                          long long batch, const Element* (Rows::*at)(long long, int) const) {
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kOwnPartners) {
        into[u][j] = own[u][(j + kVectors / 2) % kVectors];
      } else if constexpr (kPartnersInWarp) {
#pragma unroll
        for (int k = 0; k < (kVectorBytes + 3) / 4; ++k)
          into[u][j].words[k] = __float_as_uint(
              shuffle_xor(__uint_as_float(own[u][j].words[k]), kThreadsPerRow / 2));
      } else {
        const long long row = row_of(batch, u);
        const int column = rows.column(j);
        into[u][j] = RowPacket{};
        if (rows.has(row) && rows.owns(j, column))
          into[u][j] = load_row<kVectorBytes>((rows.*at)(row, partner_of(column)));
      }
    }
  }
}
