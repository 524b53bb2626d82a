// The CTAs of a cluster share rows of any length equally, in whole vectors: columns of each but the last.
DEVICE int part_of_row(int columns) {
  constexpr int kStep = kCluster * kElements;
  return (columns + kStep - 1) / kStep * kElements;
}
