// ---- Rows that are no whole vectors ------------------------------------------------------------
// Rows lie one behind the other, the first one at a multiple of a vector's bytes. Row r begins
// shift_of(r) elements behind the beginning of a vector. A team takes every (participants * kTeams)-th
// row. If it takes a second one, that step times kRowColumns is a multiple of kElements: the host has
// chosen the grid so (plan_launch in normforge/spec.py). So all rows of a team have one shift, and
// element i of a thread's vector j is the same column in each of them: weights and sums of columns stay
// in registers. All vectors are aligned in memory and in the stages.
//
// What is read. The first vector of a row begins with elements of the rows before, the last one ends
// with some of those behind. They are replaced by 0, which adds nothing to any sum. No vector begins
// before the tensor, because row 0 has no shift. Only the last row may have a vector that ends past the
// tensor. It is not copied: the thread that reads it loads its elements one by one.
//
// What is written. A vector that is not all the row's is stored element by element, since the rest of it
// is written by other CTAs.
static_assert(kCluster == 1 && kBatchRows == 1 && kResidual == 0 && kElements * sizeof(Element) == 16,
              "one row at a time, in whole vectors of the copy engine");
static_assert(kColumns >= kElements, "the last row has a whole vector to copy");

DEVICE int shift_of(long long row) {
  return static_cast<int>(row % kElements) * (kRowColumns % kElements) % kElements;
}

// Puts 0 in the place of elements that are not the row's.
DEVICE void keep_row(RowPacket& packet, int column) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (Rows::has(column + i)) continue;
    if constexpr (sizeof(Element) == 4)
      packet.words[i] = 0;
    else
      packet.words[i / 2] &= i % 2 ? 0x0000ffffu : 0xffff0000u;
  }
}

DEVICE void store_shifted(const Rows& rows, Element* to, const RowPacket& packet, int j, int column) {
  if (rows.whole(j, column)) return store_row<kVectorBytes>(to, packet);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    constexpr int kSize = static_cast<int>(sizeof(Element));
    Packet<kSize> one;
    one.words[0] = kSize == 4 ? packet.words[i * kSize / 4] : packet.words[i * kSize / 4] >> 16 * (i % 2);
    if (Rows::has(column + i)) store_row<kSize>(to + i, one);
  }
}
