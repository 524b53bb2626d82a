// ---- Strategy `semaphore`: ordered turns ------------------------------------------------------
// When its turn comes, each participant adds its partial dw to its group's row of the workspace. The
// first one stores instead, so the workspace needs no zeros. turns.cuh has the arguments for progress
// and memory ordering. Determinism class gpu_to_gpu: one order of adds, by index.
struct DwStrategy : Turns {
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    const float* teams = store_partials(smem, rows, partial);
    const unsigned g = participant / group, place = participant % group;
    const unsigned size = min(group, participants - g * group);
    float* sums = row(g);
    if (place > 0) await(group_turn(g), place);
    const auto add = [&](int column) {
      float4 sum = cta_partial(teams, column);
      if (place > 0) sum = plus(load_workspace(sums + column), sum);
      return sum;
    };
    if (place + 1 < size) {
      for_each_quad(columns, [&](int column) { store_workspace(sums + column, add(column)); });
      pass(group_turn(g), place + 1);
    } else {
      add_group(g, add);
    }
  }
};
