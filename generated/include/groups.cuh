// ---- What the rows of a group share -------------------------------------------------------------
// Consecutive rows, such as the heads of a token, share N / 2 numbers: one for every pair of columns.
// They are read through the caches, which the rows of a group and those of the next SM find them in.

// Words of fp32 numbers, or in front those of the rows' dtype: what they mean is decided where they are
// used, so that nothing waits for them before.
using GroupPacket = Packet<4 * kElements>;
constexpr int kGroupVectors = kOwnPartners ? kVectors / 2 : kVectors;

DEVICE unsigned quotient(unsigned number, long long factor) {
  return static_cast<unsigned>((static_cast<unsigned long long>(factor) * number) >> 32);
}
// Where the numbers of a row's group are, in a tensor of such a stride. Rows fit into 32 bits
// (division_factor in row_layout.py).
DEVICE long long group_start(const Arguments& args, long long row, long long stride) {
  const unsigned group = quotient(static_cast<unsigned>(row), args.group_factor);
  return (group - quotient(group, args.period_factor) * args.period) * stride;
}
// Those of all rows of a batch. Where they are of one group, those of its first row, and past the end those
// of the last batch again, which nobody uses.
DEVICE void load_group(GroupPacket (&into)[kRowsInFlight][kGroupVectors], const void* from,
                       long long stride, const Rows& rows, long long batch) {
#pragma unroll
  for (int u = 0; u < (rows.together ? 1 : kRowsInFlight); ++u) {
    const long long last = rows.batches - 1;
    const long long row = rows.together ? (batch < last ? batch : last) * kBatchRows : row_of(batch, u);
    const bool exists = rows.has(row);
    const long long start = group_start(rows.arguments, row, stride);
#pragma unroll
    for (int j = 0; j < kGroupVectors; ++j) {
      const int column = rows.column(j);
      const long long at = start + (column < kHalf ? column : column - kHalf);
      into[u][j] = GroupPacket{};
      if (!exists || !rows.owns(j, column)) continue;
      if (rows.wide) {
        constexpr int kChunk = kChunkOf<4 * kElements>;
#pragma unroll
        for (int c = 0; c < 4 * kElements / kChunk; ++c)
          *reinterpret_cast<Packet<kChunk>*>(into[u][j].words + c * kChunk / 4) =
              load_weight<kChunk>(static_cast<const float*>(from) + at + c * kChunk / 4);
      } else {
        constexpr int kChunk = kChunkOf<kVectorBytes>;
        constexpr int kStep = kChunk / static_cast<int>(sizeof(Element));
#pragma unroll
        for (int c = 0; c < kVectorBytes / kChunk; ++c)
          *reinterpret_cast<Packet<kChunk>*>(into[u][j].words + c * kChunk / 4) =
              load_weight<kChunk>(static_cast<const Element*>(from) + at + c * kStep);
      }
    }
  }
}
DEVICE float group_number(const GroupPacket& packet, int i, bool wide) {
  if (wide) return __uint_as_float(packet.words[i]);
  return element<Element>(packet.words, i);
}
