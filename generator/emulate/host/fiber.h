// Switching between the stacks of the emulated threads.
#pragma once

#if defined(__x86_64__) && !defined(NORMFORGE_UCONTEXT)
#define NORMFORGE_FAST_SWITCH
#else
#include <ucontext.h>
#endif

namespace normforge {

#if defined(NORMFORGE_FAST_SWITCH)

// The registers that a call preserves, on the stack that `stack_pointer` names while another runs.
struct Fiber {
  void* stack_pointer = nullptr;

  // Makes the next switch here call `entry`, which must not return.
  void prepare(unsigned char* stack, unsigned long bytes, void (*entry)()) {
    auto top = reinterpret_cast<unsigned long>(stack + bytes) & ~15ul;
    auto* words = reinterpret_cast<unsigned long*>(top - 8);  // where a return address would be
    *words = 0;
    *--words = reinterpret_cast<unsigned long>(entry);
    for (int i = 0; i < 6; ++i) *--words = 0;
    stack_pointer = words;
  }
};

extern "C" void normforge_switch(void** save, void* load) asm("normforge_switch");
inline void switch_fiber(Fiber& from, Fiber& to) {
  normforge_switch(&from.stack_pointer, to.stack_pointer);
}

#else

struct Fiber {
  ucontext_t context;

  void prepare(unsigned char* stack, unsigned long bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
};

inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

}  // namespace normforge
