// The rstd of the thread's rows of a batch; 0 for rows past the end.
DEVICE void load_rstds(float (&into)[kRowsInFlight], const float* rstd, long long batch,
                       long long count) {
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    const long long row = row_of(batch, u);
    into[u] = row < count ? load_rstd(rstd + row) : 0.0f;
  }
}
