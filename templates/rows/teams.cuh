// ---- Teams ----------------------------------------------------------------------------------

// A team is kTeamThreads threads, at least a warp, that go from batch to batch together. A CTA has
// kTeams of them. kThreadsPerRow threads share a row: the whole team, or part of a warp, which then
// works on kRowsAbreast rows side by side.
DEVICE unsigned team_index() { return threadIdx.x / kTeamThreads; }
DEVICE unsigned team_thread() { return threadIdx.x % kTeamThreads; }
DEVICE unsigned row_thread() { return threadIdx.x % kThreadsPerRow; }
DEVICE unsigned row_abreast() {
  if constexpr (kRowsAbreast == 1) return 0;
  return team_thread() / kThreadsPerRow;
}
