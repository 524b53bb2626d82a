// The part of the matrices that this CTA works on.
struct Rows {
  const Arguments& arguments;
  long long count, batches;  // every batch has an index below `batches`
  int first_column;  // of this CTA: 0 unless a cluster shares the row
  int columns;       // where the row ends, or this CTA's part of a row of any length

  DEVICE int column(int vector) const {
    return first_column + (vector * kThreadsPerRow + static_cast<int>(row_thread())) * kElements;
  }
  // Whether the row extends into the thread's vector that begins at this column. A kernel for many N
  // checks only vectors past the smallest N (in a cluster, all), since a check costs as much as an
  // element.
  DEVICE bool owns(int vector, int column) const {
    if constexpr (!kExact)
      if ((vector + 1) * kThreadsPerRow * kElements <= LEAST_COLUMNS) return true;
    if constexpr (kColumns == kVectors * kThreadsPerRow * kElements && kExact) return true;
    return column < (kExact ? first_column + kColumns : columns);
  }
  DEVICE const Element* x(long long row, int column) const {
    return arguments.x + start(row, arguments.x_stride, arguments.x_gap) + column;
  }
  DEVICE const Element* dy(long long row, int column) const {
    return arguments.dy + start(row, arguments.dy_stride, arguments.dy_gap) + column;
  }
  DEVICE const ResidualElement* dresidual(long long row, int column) const {
    return arguments.dresidual + row * arguments.dresidual_stride + column;
  }
  DEVICE long long start(long long row, long long stride, long long gap) const {
    return row * stride + __umulhi(static_cast<unsigned>(row), arguments.gaps) * gap;
  }
};
