// When memory that readers may still look at can be written again (epoch-based reclamation: Fraser, "Practical
// lock-freedom", 2004).
//
// A reader holds a Pin while it looks. A writer unlinks what it wants back, notes current(), and may write over it
// once current() is 2 past that: every reader that could have seen it has let go by then.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

namespace embedserve {

class Epochs {
 public:
  class Pin {
   public:
    explicit Pin(Epochs& epochs) : slot_(epochs.claim()) {}
    ~Pin() { slot_.store(kFree, std::memory_order_release); }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;

   private:
    std::atomic<uint64_t>& slot_;
  };

  uint64_t current() const { return epoch_.load(std::memory_order_seq_cst); }
  static constexpr uint64_t kGrace = 2;

  // Moves on if every reader has seen the current epoch.
  void try_advance() {
    uint64_t now = current();
    const size_t used = used_.load(std::memory_order_seq_cst);
    for (size_t i = 0; i < used; ++i) {
      const uint64_t seen = slots_[i].epoch.load(std::memory_order_seq_cst);
      if (seen != kFree && seen != now) return;
    }
    epoch_.compare_exchange_strong(now, now + 1, std::memory_order_seq_cst);
  }

 private:
  static constexpr uint64_t kFree = 0;
  static constexpr size_t kSlots = 1024;  // readers at once; one more waits some microseconds
  struct alignas(64) Slot {
    std::atomic<uint64_t> epoch{kFree};
  };

  std::atomic<uint64_t>& claim() {
    static thread_local size_t hint = 0;
    for (size_t tried = 0;; ++tried) {
      const size_t i = (hint + tried) % kSlots;
      uint64_t free = kFree;
      std::atomic<uint64_t>& slot = slots_[i].epoch;
      // The slot counts before it is taken, or a writer might not look at it.
      size_t used = used_.load(std::memory_order_seq_cst);
      while (used <= i && !used_.compare_exchange_weak(used, i + 1, std::memory_order_seq_cst)) {}
      if (slot.load(std::memory_order_relaxed) == kFree && slot.compare_exchange_strong(free, current(), std::memory_order_seq_cst)) {
        hint = i;
        return slot;
      }
      if (tried && tried % kSlots == 0) std::this_thread::yield();
    }
  }

  std::array<Slot, kSlots> slots_;
  alignas(64) std::atomic<uint64_t> epoch_{1};
  std::atomic<size_t> used_{0};
};

}  // namespace embedserve
