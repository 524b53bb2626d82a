// ---- FP8 with a scale for each block of columns ---------------------------------------------------
// A block lies in kBlockVectors vectors of each of kBlockLanes neighbouring threads of a warp. Where a
// thread has no element, it has 0, and so have all threads of its block.
// Memory ordering. Nothing but registers is exchanged.

static_assert(kElements * kBlockVectors * kBlockLanes == kBlockColumns && kVectors % kBlockVectors == 0 &&
                  kBlockLanes <= 32 && kThreadsPerRow % kBlockLanes == 0,
              "the threads of a block are neighbours");
constexpr int kThreadBlocks = kVectors / kBlockVectors;
constexpr int kRowBlocks = kRowColumns / kBlockColumns;
static_assert(kExact && kColumns % kBlockColumns == 0, "blocks are whole");

// Rounds to the dtype of the rows.
DEVICE void round_to_rows(float (&values)[kVectors][kElements]) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    RowPacket packet;
    narrow<Element, kElements>(packet.words, values[j]);
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[j][i] = element<Element>(packet.words, i);
  }
}

// The scales of the thread's blocks in a row.
struct RowScales {
  BlockScale scales[kThreadBlocks];

  // All lanes of a warp come here together: teams are whole warps, and all their threads go through every
  // batch. Every step is done for all blocks before the next, so that they do not wait for one another.
  template <typename... Options>
  DEVICE explicit RowScales(const float (&values)[kVectors][kElements], Options... options) {
    float amax[kVectors] = {};  // NaN if there is one
#pragma unroll
    for (int i = 0; i < kElements; ++i)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) amax[j] = larger_magnitude(amax[j], values[j][i]);
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (j % kBlockVectors != 0)
        amax[j / kBlockVectors * kBlockVectors] = larger_magnitude(amax[j / kBlockVectors * kBlockVectors], amax[j]);
#pragma unroll
    for (int mask = kBlockLanes / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int j = 0; j < kVectors; j += kBlockVectors)
        amax[j] = larger_magnitude(amax[j], shuffle_xor(amax[j], mask));
#pragma unroll
    for (int b = 0; b < kThreadBlocks; ++b) scales[b] = BlockScale(amax[b * kBlockVectors], options...);
  }
  template <typename Quotient>
  DEVICE static Packet<kElements> quantized(const float (&values)[kElements], Quotient quotient) {
    Packet<kElements> packet{};
#pragma unroll
    for (int i = 0; i < kElements; i += 2)
      packet.words[i / 4] |= pack_e4m3(quotient(values[i]), quotient(values[i + 1])) << (i % 4 * 8);
    return packet;
  }
  // Stores the elements, divided by their scales, from where that of the thread's first vector goes.
  template <typename Narrow>
  DEVICE void store_quantized(const Rows& rows, Narrow* to, const float (&values)[kVectors][kElements]) const {
    Packet<kElements> packets[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const BlockScale& scale = scales[j / kBlockVectors];
      packets[j] = quantized(values[j], [&](float y) { return scale.quotient(y); });
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (rows.owns(j, rows.column(j))) store_row<kElements>(to + Rows::distance(j), packets[j]);
  }
  // Stores the scales, from where that of the thread's first block goes.
  template <typename Scale> DEVICE void store(const Rows& rows, Scale* to) const {
    if (row_thread() % kBlockLanes != 0) return;
#pragma unroll
    for (int b = 0; b < kThreadBlocks; ++b)
      if (rows.owns(b * kBlockVectors, rows.column(b * kBlockVectors)))
        store_scale(to + b * (kThreadsPerRow / kBlockLanes), scales[b].value);
  }
};
