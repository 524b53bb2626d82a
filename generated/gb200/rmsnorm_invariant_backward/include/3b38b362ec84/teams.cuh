// ---- Who does what --------------------------------------------------------------------------

// A team is kTeamThreads threads, a warp at least, that go from batch to batch together; a CTA has
// kTeams of them. kThreadsPerRow threads share a row: the whole team, or a part of a warp, which then
// works on kRowsAbreast rows side by side.
DEVICE unsigned team_index() { return threadIdx.x / kTeamThreads; }
DEVICE unsigned team_thread() { return threadIdx.x % kTeamThreads; }
DEVICE unsigned row_thread() { return threadIdx.x % kThreadsPerRow; }
DEVICE unsigned row_abreast() {
  if constexpr (kRowsAbreast == 1) return 0;
  return team_thread() / kThreadsPerRow;
}

// The thread's row number u of a batch; which rows those are is up to the schedule. By reference:
// NVRTC then makes the code that it makes of the bare expression; by value, other loops.
DEVICE long long row_of(const long long& batch, const int& u);

// rstd of the thread's rows of a batch; 0 for rows past the end.
DEVICE void load_rstds(float (&into)[kRowsInFlight], const float* rstd, long long batch,
                       long long count) {
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    const long long row = row_of(batch, u);
    into[u] = row < count ? load_rstd(rstd + row) : 0.0f;
  }
}
