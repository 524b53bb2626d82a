// count: rows of partial dw; columns: of the whole row. CTA b sums slice b / kCluster of rank
// b % kCluster.
extern "C" __global__ void __launch_bounds__(kSumThreads)
    sum_partials(const float* scratch, void* dw, int count, int columns, int dw_mode) {
  STATIC_SHARED(float, buffer, kSumThreads * 4);
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  const int slice = static_cast<int>(blockIdx.x) / kCluster;
  const int part = part_of_row(columns);
  const int left = columns - rank * part;
  const DwOutput out = DwOutput{dw, dw_mode}.from(rank * part);
  wait_for_primary();
  sum_slice<kSumThreads, kTailColumns>(
      scratch + rank * kPartialStride, static_cast<long long>(kCluster) * kPartialStride,
      static_cast<unsigned>(count), slice * kTailColumns, left < part ? left : part,
      buffer, [&](int column, float total) { out.store(column, total); });
}
