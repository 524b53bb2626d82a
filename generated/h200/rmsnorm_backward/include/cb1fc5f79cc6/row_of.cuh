// The thread's row number u of a batch, which is kBatchRows consecutive rows. By reference: NVRTC
// then makes the code that it makes of the bare expression; by value, other loops.
DEVICE long long row_of(const long long& batch, const int& u) {
  return batch * kBatchRows + u * kRowsAbreast + row_abreast();
}
