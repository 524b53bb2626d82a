// The workspace, which CTAs write for each other: every word knows who wrote it last, and an access
// that nothing orders behind that write is a race, in whatever schedule it happens.
#include <cstring>

#include "machine.h"

namespace normforge {

namespace {

// The event that made a word what it is; a bulk operation has none before it is published.
Word as_seen(const Word& word) {
  if (word.copy == kUnset) return word;
  const Copy& copy = m.copies[word.copy];
  Word seen = word;
  seen.event = copy.published ? copy.event : Event{Event::kNone, 0, 0};
  seen.release = copy.release;
  return seen;
}

bool knows(const Thread& thread, const Word& word) {
  const Word seen = as_seen(word);
  if (seen.event.who == Event::kInitial) return true;
  if (seen.event.who == Event::kNone) return false;
  if (thread.cta->grid == &m.sum && word.cta < m.launch.grid) return thread.knows_primary;
  if (word.cta == thread.cta->id) return ordered(seen.event, thread);
  return thread.cta->known.knows(seen) || thread.learned.knows(seen);
}

[[noreturn]] void report_race(const Word& word, const float* at, const char* verb, int line) {
  const std::string place = place_of(at);
  const bool sum = word.cta >= m.launch.grid;
  const std::string cta = "CTA " + std::to_string(sum ? word.cta - m.launch.grid : word.cta) +
                          (sum ? " of sum_partials" : "");
  if (word.copy != kUnset && !m.copies[word.copy].published)
    fault(line, "race: %s %s, where the %s of %s may not have landed: it was not waited for until "
          "written, or not fenced, before the signal", verb, place.c_str(),
          describe_copy(m.copies[word.copy]).c_str(), cta.c_str());
  fault(line, "race: %s %s, which %s %s wrote, and no barrier and release order the two", verb,
        place.c_str(), cta.c_str(), event_name(as_seen(word).event).c_str());
  __builtin_unreachable();
}

struct Words {
  Word* words;
  std::vector<Word>* adds;  // of the quad, or null
  std::size_t index;
};

Words checked_words(const float* at, unsigned count, const char* verb, int line) {
  const Buffer& b =
      checked_buffer(1u << kZeroed | 1u << kScratch, at, std::size_t{count} * 4, verb, line);
  check_aligned(at, count % 4 ? 4 : 16, verb, line);
  const auto index = static_cast<std::size_t>(at - reinterpret_cast<float*>(b.base));
  const bool zeroed = &b == &m.buffers[kZeroed];
  return {m.words[zeroed ? 0 : 1].data() + index, zeroed ? &m.adds[index / 4] : nullptr, index};
}

void check_adds(const Thread& self, const Words& at, const float* address, const char* verb,
                int line) {
  if (at.adds)
    for (const Word& word : *at.adds)
      if (!knows(self, word)) report_race(word, address, verb, line);
}

}  // namespace

void workspace_read(const float* from, unsigned count, int line) {
  const Thread& self = *m.current;
  const Words at = checked_words(from, count, "reads", line);
  for (unsigned i = 0; i < count; ++i) {
    const Word& word = at.words[i];
    if (word.fresh()) {
      // Whole float4s are read; what lies behind the last column of a row is never used.
      if ((at.index + i) % m.launch.partial_stride >= m.launch.partial_columns) continue;
      fault(line, "reads %s, which nobody has written", place_of(from + i).c_str());
    }
    if (!knows(self, word)) report_race(word, from + i, "reads", line);
  }
  check_adds(self, at, from, "reads", line);
}

void workspace_write(const float* to, unsigned count, int line) {
  const Thread& self = *m.current;
  const Words at = checked_words(to, count, "writes", line);
  check_adds(self, at, to, "overwrites", line);
  if (at.adds) at.adds->clear();
  for (unsigned i = 0; i < count; ++i) {
    Word& word = at.words[i];
    if (!word.fresh() && !knows(self, word)) report_race(word, to + i, "overwrites", line);
    word = Word{self.cta->id, kUnset, self.releases, self.now()};
  }
}

// ---- Words that tell by themselves whether they have arrived ----

namespace {

constexpr unsigned kWhole = 15;  // all four words

unsigned bits_of(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct Quad {
  Mail& mail;
  Word* words;
  const std::vector<Word>& adds;
  float* values;
  unsigned index;  // of the first word

  unsigned present() const {
    unsigned mask = 0;
    for (unsigned i = 0; i < 4; ++i)
      if (bits_of(values[i])) mask |= 1u << i;
    return mask;
  }
  // The place of the first word in the mask.
  std::string place(unsigned mask) const { return place_of(values + __builtin_ctz(mask)); }
  void change(unsigned i, float value) {
    values[i] = value;
    const Thread& self = *m.current;
    words[i] = Word{self.cta->id, kUnset, self.releases, self.now()};
    ++mail.version;
    for (Thread* thread : mail.waiting) make_ready(*thread);
    mail.waiting.clear();
  }
  Mail::Look* find_look(const Thread& thread) {
    for (Mail::Look& look : mail.looks)
      if (look.cta == thread.cta->id && look.thread == thread.index) return &look;
    return nullptr;
  }
};

Quad checked_quad(const float* at, const char* verb, int line) {
  const Buffer& b = checked_buffer(1u << kZeroed, at, 16, verb, line);
  check_aligned(at, 16, verb, line);
  auto* values = const_cast<float*>(at);
  const auto index = static_cast<unsigned>(at - reinterpret_cast<const float*>(b.base));
  return {m.mail[index / 4], &m.words[0][index], m.adds[index / 4], values, index};
}

}  // namespace

void mail_send(float* to, const float* values, int line) {
  Quad quad = checked_quad(to, "sends", line);
  maybe_yield();
  if (quad.mail.sent) fault(line, "sends to %s a second time in this launch", place_of(to).c_str());
  for (unsigned i = 0; i < 4; ++i) {
    if (bits_of(values[i]) == 0)
      fault(line, "sends 0 to %s, which nobody can receive", quad.place(1u << i).c_str());
    if (quad.words[i].event.who != Event::kInitial || !quad.adds.empty())
      fault(line, "sends to %s, which is not empty", quad.place(1u << i).c_str());
  }
  quad.mail.sent = true;
  // Every word is an access of its own: they arrive in any order, and others run in between.
  const unsigned first = m.rng.below(4);
  for (unsigned i = 0; i < 4; ++i) {
    if (i) maybe_yield();
    quad.change((first + i) % 4, values[(first + i) % 4]);
  }
}

void mail_receive(const float* from, float* values, int line) {
  Quad quad = checked_quad(from, "receives", line);
  maybe_yield();
  const Thread& self = *m.current;
  Mail::Look* look = quad.find_look(self);
  // A thread that asks again although it has been shown all there is sleeps until there is news.
  if (look && look->version == quad.mail.version && quad.present() != kWhole &&
      look->shown == quad.present()) {
    quad.mail.waiting.push_back(m.current);
    wait_for(Wait::kMail, line,
             quad.index + static_cast<unsigned>(__builtin_ctz(~quad.present())));
    look = quad.find_look(self);
  }
  if (look == nullptr) {
    quad.mail.looks.push_back({self.cta->id, self.index, 0, 0, 0});
    look = &quad.mail.looks.back();
  }
  unsigned shown = quad.present();
  for (unsigned i = 0; i < 4; ++i)
    if (!quad.mail.sent && !knows(self, quad.words[i]))
      report_race(quad.words[i], from + i, "receives", line);
  if (m.rng.chance(m.policy.hide_percent)) {
    const unsigned hidden = m.rng.below(kWhole + 1) & ~look->received;
    for (unsigned i = 0; i < 4; ++i)
      if (hidden >> i & 1 && !knows(self, quad.words[i])) shown &= ~(1u << i);
  }
  for (const Mail::Look& other : quad.mail.looks)
    if (&other != look && (other.received & shown))
      fault(line, "receives %s, which CTA %u thread %u has received already",
            quad.place(other.received & shown).c_str(), other.cta, other.thread);
  look->version = quad.mail.version;
  look->shown = shown;
  look->received |= shown;
  for (unsigned i = 0; i < 4; ++i) values[i] = shown >> i & 1 ? quad.values[i] : 0.0f;
}

void mail_empty(float* at, int line) {
  Quad quad = checked_quad(at, "empties", line);
  maybe_yield();
  const Mail::Look* look = quad.find_look(*m.current);
  const unsigned missing = kWhole & ~(look ? look->received : 0);
  if (missing)
    fault(line, "empties %s, which this thread has not received", quad.place(missing).c_str());
  if (quad.present() != kWhole)
    fault(line, "empties %s, which is empty", quad.place(~quad.present()).c_str());
  for (unsigned i = 0; i < 4; ++i) quad.change(i, 0.0f);
}

namespace {

// Atomic adds to global memory treat subnormal operands and results as zero (PTX ISA, red).
float flushed(float value) { return __builtin_fabsf(value) < 0x1p-126f ? value * 0.0f : value; }

void add_float(unsigned char* to, const unsigned char* from) {
  float sum, term;
  std::memcpy(&sum, to, 4);
  std::memcpy(&term, from, 4);
  sum = flushed(flushed(sum) + flushed(term));
  std::memcpy(to, &sum, 4);
}

// An add that needs no order to the other adds, only to stores before it.
void note_add(const Words& at, unsigned count, const float* to, const Word& word, int line) {
  for (unsigned i = 0; i < count; ++i) {
    const Word& before = at.words[i];
    if (before.fresh())
      fault(line, "adds to %s, which nobody has written", place_of(to + i).c_str());
    if (!knows(*m.current, before)) report_race(before, to + i, "adds to", line);
  }
  if (at.adds == nullptr) fault(line, "adds to %s in no order", place_of(to).c_str());
  at.adds->push_back(word);
}

}  // namespace

void workspace_add(float* to, const float* values, unsigned count, int line) {
  maybe_yield();
  const Thread& self = *m.current;
  const Words at = checked_words(to, count, "adds to", line);
  note_add(at, count, to, Word{self.cta->id, kUnset, self.releases, self.now()}, line);
  for (unsigned i = 0; i < count; ++i)
    add_float(reinterpret_cast<unsigned char*>(to + i),
              reinterpret_cast<const unsigned char*>(values + i));
}

// The destination of a bulk operation of the current thread, from when it is issued on.
void note_workspace_copy(unsigned index, bool add, int line) {
  const Copy& copy = m.copies[index];
  const Thread& self = *m.current;
  auto* to = reinterpret_cast<float*>(copy.to);
  const unsigned count = copy.bytes / 4;
  const Words at = checked_words(to, count, add ? "adds to" : "writes", line);
  const Word mine{self.cta->id, index, self.releases, Event{Event::kNone, 0, 0}};
  bool others = false;
  for (unsigned i = 0; i < count; ++i) {
    const Word& word = at.words[i];
    others |= word.event.who != Event::kInitial && word.cta != self.cta->id && !word.fresh();
  }
  if (add && !m.launch.ordered_adds) {
    for (unsigned i = 0; i < count; i += 4)
      note_add({at.words + i, at.adds ? at.adds + i / 4 : nullptr, at.index + i}, 4, to + i, mine,
               line);
  } else {
    for (unsigned i = 0; i < count; ++i) {
      Word& word = at.words[i];
      const bool padding = (at.index + i) % m.launch.partial_stride >= m.launch.partial_columns;
      if (word.fresh() && add && !padding)
        fault(line, "adds to %s, which nobody has written", place_of(to + i).c_str());
      if (!word.fresh() && !knows(self, word))
        report_race(word, to + i, add ? "adds to" : "overwrites", line);
      word = mine;
    }
  }
  if (others && self.acquired)
    fault(line, "no proxy fence between an acquire and the bulk operation on %s that relies on it",
          place_of(to).c_str());
}

void add_staged(Copy& copy, unsigned from, unsigned bytes) {
  for (unsigned i = from; i < from + bytes; i += 4) add_float(copy.to + i, copy.staged.data() + i);
}

}  // namespace normforge
