// ---- FP8 with a scale for each block of columns ---------------------------------------------------
// A block lies in one vector of each of kBlockLanes neighbouring threads of a warp. Where a thread has no
// element, it has 0, and so have all threads of its block.
// Memory ordering. Nothing but registers is exchanged.

constexpr int kBlockLanes = kBlockColumns / kElements;
static_assert(kBlockColumns % kElements == 0 && kBlockLanes <= 32 && kThreadsPerRow % kBlockLanes == 0,
              "the threads of a block are neighbours");
constexpr int kRowBlocks = kRowColumns / kBlockColumns;
static_assert(kExact && kColumns % kBlockColumns == 0, "blocks are whole");

// The largest magnitude in the block; NaN if it has one. All lanes of a warp come here together: teams are
// whole warps, and all their threads go through every batch.
DEVICE float block_amax(const float (&values)[kElements]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) amax = larger_magnitude(amax, values[i]);
#pragma unroll
  for (int mask = kBlockLanes / 2; mask > 0; mask /= 2)
    amax = larger_magnitude(amax, shuffle_xor(amax, mask));
  return amax;
}

// Rounds to the dtype of the rows.
DEVICE void round_to_rows(float (&values)[kElements]) {
  RowPacket packet;
  narrow<Element, kElements>(packet.words, values);
#pragma unroll
  for (int i = 0; i < kElements; ++i) values[i] = element<Element>(packet.words, i);
}

DEVICE Packet<kElements> quantized(const float (&values)[kElements], const BlockScale& scale) {
  Packet<kElements> packet{};
#pragma unroll
  for (int i = 0; i < kElements; i += 2)
    packet.words[i / 4] |= pack_e4m3(scale.quotient(values[i]), scale.quotient(values[i + 1]))
                           << (i % 4 * 8);
  return packet;
}
