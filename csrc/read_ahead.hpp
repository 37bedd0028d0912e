// Steps of work done ahead of a consumer, handed out in order: by threads of our own while the consumer computes, and
// by the consumer itself where it is back before waking a thread would have paid.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace prism {

class ReadAhead {
 public:
  struct Config {
    std::uint64_t steps = 0;
    std::uint64_t start = 0;     // first step
    std::uint64_t prefetch = 0;  // steps done ahead; 0: no threads, all in the consumer's own
    std::uint64_t threads = 1;
    bool in_order = false;  // a step needs what the one before it left behind: one at a time, none after a failure
    std::string forked;     // what a process is told that forked off this one
  };
  /// Slots that stay untouched after they were handed out: the last one and the one before it.
  static constexpr std::uint64_t kLent = 2;
  static std::uint64_t slots(std::uint64_t prefetch) { return (prefetch == 0 ? 1 : prefetch) + kLent; }

  /// `work(step, slot)` does a step; slot is step % slots(prefetch), used by nobody else meanwhile. Threads start here.
  ReadAhead(Config config, std::function<void(std::uint64_t step, std::size_t slot)> work);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  enum class Wait { ready, finished, timeout };
  /// Waits up to `milliseconds` for the next step. What its work threw is thrown in its place, by every later call too.
  Wait next(std::size_t& slot, unsigned milliseconds);

  /// This process forked off the one whose threads these are. It has the object but not its threads, and condition
  /// variables that count waiters which never leave: it can use nothing of it, nor destroy it, only let go of it.
  bool forked() const;

 private:
  struct Slot {
    std::exception_ptr failure;
    std::atomic<bool> ready = false;
  };
  using Clock = std::chrono::steady_clock;

  bool exhausted() const { return claimed_ == config_.steps || halted_; }
  void work_next(std::unique_lock<std::mutex>& lock);
  void run();
  void stop_workers();

  Config config_;
  std::function<void(std::uint64_t, std::size_t)> work_;
  unsigned generation_;  // of the process, see forked()
  std::vector<Slot> slots_;
  Clock::time_point left_;       // when the last step was handed out
  Clock::duration mean_step_{};  // from one hand-out to the next, of late

  std::mutex mutex_;
  std::condition_variable ready_;   // the consumer's next step is done
  std::condition_variable wanted_;  // there is room to work ahead
  std::uint64_t claimed_;           // steps below this one are done, or being done
  std::uint64_t taken_;             // steps below this one were handed out
  bool busy_ = false;               // in order: a step is being done
  bool halted_ = false;             // in order: a step has failed
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace prism
