// Where dw goes, and how: rounded once to the weight's dtype (mode 0), as fp32 (1), or added to an fp32
// buffer (2). The host's names for the modes are in kernel_arguments.py. One thread stores each element,
// once.
struct DwOutput {
  void* base;
  int mode;

  DEVICE void store(int column, float value) const {
    if (mode == 0) {
      store_dw(static_cast<WeightElement*>(base) + column, value);
    } else {
      float* to = static_cast<float*>(base) + column;
      store_dw(to, mode == 1 ? value : __fadd_rn(load_dw(to), value));
    }
  }
  DEVICE void store4(int column, int columns, float4 value) const {
    store(column, value.x);
    if (column + 1 < columns) store(column + 1, value.y);
    if (column + 2 < columns) store(column + 2, value.z);
    if (column + 3 < columns) store(column + 3, value.w);
  }
  // The output for the columns from `first` on.
  DEVICE DwOutput from(int first) const {
    return {mode == 0 ? static_cast<void*>(static_cast<WeightElement*>(base) + first)
                      : static_cast<void*>(static_cast<float*>(base) + first),
            mode};
  }
};
