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
DEVICE void load_group(GroupPacket (&into)[kRowsInFlight][kGroupVectors], const void* from,
                       long long stride, const Rows& rows, long long batch) {
  const bool wide = sizeof(Element) == 4 || rows.arguments.wide_groups;
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    const long long row = row_of(batch, u);
    const long long start = group_start(rows.arguments, row, stride);
#pragma unroll
    for (int j = 0; j < kGroupVectors; ++j) {
      const int column = rows.column(j);
      const long long at = start + (column < kHalf ? column : column - kHalf);
      into[u][j] = GroupPacket{};
      if (row >= rows.count || !rows.owns(j, column)) continue;
      if (wide) {
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
DEVICE float group_number(const GroupPacket& packet, int i, int wide) {
  if (sizeof(Element) == 4 || wide) return __uint_as_float(packet.words[i]);
  return element<Element>(packet.words, i);
}
