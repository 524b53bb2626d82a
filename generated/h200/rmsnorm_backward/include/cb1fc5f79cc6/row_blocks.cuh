// ---- Blocks of rows --------------------------------------------------------------------------
// The error of a sum grows with the additions that a term goes through. So a thread adds up the rows
// of kBlockBatches batches, and then those sums. (In a cluster a block ends within a batch, before the
// rows of that are added, so that the first has a batch less.) The sum of its complete blocks waits in
// shared memory, in a place that no other thread and no bulk copy touches, so it needs neither a
// barrier nor a fence. What is added when depends on the number of the thread's batches alone.
struct RowBlocks {
  static_assert((kBlockBatches & (kBlockBatches - 1)) == 0, "a remainder for every batch");
  static constexpr int kChunk = kElements % 4 == 0 ? 4 : 1;  // floats; without bank conflicts

  float* sums;
  unsigned batches = 0;

  DEVICE RowBlocks(unsigned char* smem)
      : sums(reinterpret_cast<float*>(smem + kBlockSumsOffset)) {}
  DEVICE float* place(int j, int i) const {
    return sums + ((j * kElements + i) / kChunk * kThreads + threadIdx.x) * kChunk;
  }
  DEVICE void end_batch(float (&partial)[kVectors][kElements]) {
    if (++batches % kBlockBatches != 0) return;
    if (batches != kBlockBatches) add(partial);
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kElements; i += kChunk) {
        if constexpr (kChunk == 4) {
          store_shared4(place(j, i), make_float4(partial[j][i], partial[j][i + 1],
                                                 partial[j][i + 2], partial[j][i + 3]));
          partial[j][i + 1] = partial[j][i + 2] = partial[j][i + 3] = 0.0f;
        } else {
          store_shared(place(j, i), partial[j][i]);
        }
        partial[j][i] = 0.0f;
      }
  }
  // The sum of all batches, behind the last one.
  DEVICE void finish(float (&partial)[kVectors][kElements]) const {
    if (batches >= kBlockBatches) add(partial);
  }
  DEVICE void add(float (&partial)[kVectors][kElements]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kElements; i += kChunk) {
        if constexpr (kChunk == 4) {
          const float4 sum = load_shared4(place(j, i));
          partial[j][i] = __fadd_rn(sum.x, partial[j][i]);
          partial[j][i + 1] = __fadd_rn(sum.y, partial[j][i + 1]);
          partial[j][i + 2] = __fadd_rn(sum.z, partial[j][i + 2]);
          partial[j][i + 3] = __fadd_rn(sum.w, partial[j][i + 3]);
        } else {
          partial[j][i] = __fadd_rn(load_shared(place(j, i)), partial[j][i]);
        }
      }
  }
};
