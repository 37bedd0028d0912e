#include "read_ahead.hpp"

#include <pthread.h>

#include <stdexcept>
#include <utility>

namespace prism {
namespace {

// Waking a thread costs the consumer some microseconds and the thread some tens of them. Steps that come and go faster
// than this are done by the consumer itself (measured: benchmarks/negative-results.md).
constexpr std::chrono::microseconds kWakePays{50};
constexpr int kSpins = 1000;  // 10 to 50 microseconds, about what a sleep and a wake would take

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// How many forks lie between this process and the one that loaded the library: getpid() would be a system call a step.
std::atomic<unsigned> generation{0};

unsigned process_generation() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++generation; });
  if (registered != 0) throw std::runtime_error("pthread_atfork: out of memory");
  return generation.load(std::memory_order_relaxed);
}

}  // namespace

ReadAhead::ReadAhead(Config config, std::function<void(std::uint64_t, std::size_t)> work)
    : config_(std::move(config)),
      work_(std::move(work)),
      generation_(process_generation()),
      slots_(slots(config_.prefetch)),
      left_(Clock::now()),
      claimed_(config_.start),
      taken_(config_.start) {
  try {
    if (config_.prefetch > 0) {
      for (std::uint64_t i = 0; i < config_.threads; ++i) workers_.emplace_back([this] { run(); });
    }
  } catch (...) {  // no more threads to be had: those that run must not outlive what they point to
    stop_workers();
    throw;
  }
}

ReadAhead::~ReadAhead() { stop_workers(); }

bool ReadAhead::forked() const { return generation.load(std::memory_order_relaxed) != generation_; }

void ReadAhead::stop_workers() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wanted_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// Does the next step that nobody has begun; `lock` is held before and after, and given up meanwhile.
void ReadAhead::work_next(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t step = claimed_++;
  const std::size_t number = static_cast<std::size_t>(step % slots_.size());
  Slot& slot = slots_[number];
  slot.ready.store(false, std::memory_order_relaxed);
  slot.failure = nullptr;
  busy_ = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    work_(step, number);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  busy_ = false;
  if (failure) {
    slot.failure = failure;
    halted_ = config_.in_order;
  }
  slot.ready.store(true, std::memory_order_release);
  if (step == taken_) ready_.notify_one();
}

void ReadAhead::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [&] {
      const bool free = !config_.in_order || !busy_;
      return stop_ || exhausted() || (free && claimed_ < taken_ + config_.prefetch);
    });
    if (stop_ || exhausted()) return;
    work_next(lock);
  }
}

ReadAhead::Wait ReadAhead::next(std::size_t& number, unsigned milliseconds) {
  if (forked()) throw std::runtime_error(config_.forked);
  std::unique_lock lock(mutex_);
  if (taken_ == config_.steps) return Wait::finished;
  number = static_cast<std::size_t>(taken_ % slots_.size());
  Slot& slot = slots_[number];
  const auto ready = [&] { return claimed_ > taken_ && slot.ready.load(std::memory_order_acquire); };
  if (claimed_ == taken_) work_next(lock);
  if (!ready()) {
    lock.unlock();
    for (int i = 0; i < kSpins && !slot.ready.load(std::memory_order_acquire); ++i) relax();
    lock.lock();
    if (!ready_.wait_for(lock, std::chrono::milliseconds(milliseconds), ready)) return Wait::timeout;
  }
  if (slot.failure) std::rethrow_exception(slot.failure);
  ++taken_;
  // Threads sleep until half of what they may do ahead is to be done, and the consumer takes its time.
  const std::uint64_t room = taken_ + config_.prefetch - claimed_;
  lock.unlock();
  if (!workers_.empty()) {
    // On average over some steps: a consumer may take several at once and compute then, and one long step among many
    // short ones may be the scheduler's doing.
    const Clock::time_point now = Clock::now();
    mean_step_ += (now - std::exchange(left_, now) - mean_step_) / 16;
    if (mean_step_ > kWakePays && 2 * room >= config_.prefetch) wanted_.notify_all();
  }
  return Wait::ready;
}

}  // namespace prism
