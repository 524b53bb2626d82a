// ---- Blocks of rows --------------------------------------------------------------------------
// The error of a sum grows with the number of additions that a term passes through. So a thread first
// adds the rows of kBlockBatches batches, and then adds these sums. (In a cluster a block ends within a
// batch, before the batch's rows are added, so the first block has one batch fewer.) The sum of the
// complete blocks is kept in shared memory that no other thread and no bulk copy touches, so it needs
// neither a barrier nor a fence. The order of adds depends only on the number of the thread's batches.
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
  // The sum of all batches, after the last one.
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
