// ---- Strategy `bulk_reduce`, in turns ---------------------------------------------------------
// As `semaphore`, but the copy engine adds: the CTA's partial dw goes from shared memory into its
// group's row as one bulk reduce-add (the first of a group stores instead). These adds flush subnormal
// numbers to zero, so the bits may differ from those of `semaphore`; they are the same in every run.
//
// Memory ordering. Ordinary stores write the partial dw. Each thread orders its own before the copy
// engine's reads by a proxy fence, and the CTA barrier gathers the threads before thread 0 issues the
// operation. The turn is passed only after the full wait. Then the destination has been written and is
// visible to ordinary accesses (`.read` would only say that the source was read), so the release
// covers the landed sums. The next participant has a proxy fence between its acquire and its own bulk
// operation, which leads back into the async proxy. The fence before the release is not strictly
// required by the model, and costs nothing beside the wait. The next launch's first bulk store into row 0
// comes after ordinary stores of this one (`add_group`): it comes after the end of this grid, and stream
// order holds for every proxy.
// Determinism class gpu_to_gpu: one order of adds, by index.
struct DwStrategy : Turns {
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    float* teams = store_partials(smem, rows, partial);
    const unsigned g = participant / group, place = participant % group;
    const unsigned size = min(group, participants - g * group);
    float* sums = row(g);
    for_each_quad(columns, [&](int column) {
      store_shared4(teams + column, cta_partial(teams, column));
    });
    fence_async_shared();
    cta_barrier();
    if (threadIdx.x == 0) {
      const unsigned bytes = (columns + 3) / 4 * 16;
      if (place > 0) {
        while (load_acquire(group_turn(g)) != place) {
        }
        fence_async_global();
        bulk_add(sums, teams, bytes);
      } else {
        bulk_store(sums, teams, bytes);
      }
      bulk_commit();
      bulk_wait_written();
      fence_async_global();
      if (place + 1 < size) store_release(group_turn(g), place + 1);
    }
    if (place + 1 < size) return;
    cta_barrier();  // the group's sum has landed and is visible to every thread
    add_group(g, [&](int column) { return load_workspace(sums + column); });
  }
};
