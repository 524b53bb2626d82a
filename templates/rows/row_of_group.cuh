// A batch is identified by its first row. Its rows belong to one group and one team (runs.cuh), and are
// row_step() rows apart.
constexpr int kGroupsOfChunk = kChunkRows / kGroupRows;
static_assert((kGroupsOfChunk & (kGroupsOfChunk - 1)) == 0, "groups are added in pairs");
DEVICE constexpr int row_step() { return kGroupsOfChunk * kTeams; }

DEVICE long long row_of(const long long& batch, const int& u) {
  return batch + (u * kRowsAbreast + static_cast<int>(row_abreast())) * row_step();
}
