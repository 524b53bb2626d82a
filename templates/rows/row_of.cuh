// The index of the thread's row u of a batch of kBatchRows consecutive rows. (With parameters by value
// NVRTC generates other loops than for the bare expression.)
DEVICE long long row_of(const long long& batch, const int& u) {
  return batch * kBatchRows + u * kRowsAbreast + row_abreast();
}
