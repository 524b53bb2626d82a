// ---- Turns ------------------------------------------------------------------------------------
// Participants add their partial dw one after another, in the order of their index: in chains of
// `group` participants, and then over the groups (with one level there is a single group). A participant
// is one CTA: these strategies have no clusters.
//
// Progress. No CTA waits for one that might never run. Its index is not blockIdx but a ticket drawn
// when the CTA starts, and it waits only for smaller indices, whose CTAs have started. A CTA that has
// started keeps running until it ends. So the chain always moves, whatever the grid and however many
// CTAs the device holds at once. The index decides which rows a CTA works on, so dw does not depend on
// which CTA drew which ticket.
//
// Memory ordering. The CTA barrier in `pass` orders the adds of all threads before thread 0's release
// at gpu scope, which is cumulative. The next CTA's thread 0 acquires the counter, and its CTA barrier
// extends that to its threads. (In `bulk_reduce`, only thread 0 takes part in turns within a group. Its
// fragment argues for the order of those turns.)
struct Turns : DwContext {
  // counters: [0] start tickets, [1 + g] turn inside group g, [1 + groups] turn of the groups.
  DEVICE unsigned groups() const { return (participants + group - 1) / group; }
  DEVICE unsigned* group_turn(unsigned g) const { return counters + 1 + g; }
  DEVICE unsigned* top_turn() const { return counters + 1 + groups(); }

  DEVICE unsigned begin() const {
    if (output.base == nullptr) return blockIdx.x;  // no dw, no turns
    unsigned ticket = 0;
    if (threadIdx.x == 0) ticket = take_ticket(counters);
    return broadcast(smem, ticket);
  }
  DEVICE static void await(const unsigned* turn, unsigned mine) {
    if (threadIdx.x == 0)
      while (load_acquire(turn) != mine) {
      }
    cta_barrier();
  }
  DEVICE static void pass(unsigned* turn, unsigned next) {
    cta_barrier();
    if (threadIdx.x == 0) store_release(turn, next);
  }
  // Called by the very last participant. Every other one has started, has had its turns, and no longer
  // looks at a counter: each passed its turn on only after its last look at one.
  DEVICE void reset() const {
    if (threadIdx.x != 0) return;
    for (unsigned i = 0; i < groups() + 2; ++i) store_relaxed(counters + i, 0);
  }
  // The last of a group adds the group's sum, `own(column)`, to the total in workspace row 0.
  template <typename Sum> DEVICE void add_group(unsigned g, Sum own) const {
    const bool last = g + 1 == groups();
    if (g > 0) await(top_turn(), g);
    float* total = row(0);
    for_each_quad(columns, [&](int column) {
      float4 sum = own(column);
      if (g > 0) sum = plus(load_workspace(total + column), sum);
      if (last)
        own_dw().store4(column, columns, sum);
      else
        store_workspace(total + column, sum);
    });
    if (last)
      reset();
    else
      pass(top_turn(), g + 1);
  }
};
