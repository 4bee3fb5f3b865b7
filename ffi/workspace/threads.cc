#include "ffi/workspace/threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace megamoe {
namespace {

// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kSerialCost = 1 << 17;

class ThreadCache {
 public:
  void run(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (idle_ > static_cast<int64_t>(tasks_.size())) {
        tasks_.push_back(std::move(task));
        wake_.notify_one();
        return;
      }
    }
    try {
      std::thread([this, task] {
        task();
        serve();
      }).detach();
    } catch (const std::system_error&) {
      task();
    }
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      --idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  int64_t idle_ = 0;
};

class AlarmClock {
 public:
  AlarmClock() {
    std::thread([this] { serve(); }).detach();
  }

  Alarm set(double seconds, std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto wait = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(seconds));
    const Alarm alarm(std::chrono::steady_clock::now() + wait, next_++);
    alarms_[alarm] = std::move(task);
    if (alarms_.begin()->first == alarm) wake_.notify_one();
    return alarm;
  }

  void cancel(const Alarm& alarm) {
    std::lock_guard<std::mutex> lock(mutex_);
    alarms_.erase(alarm);
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (alarms_.empty()) {
        wake_.wait(lock);
      } else if (alarms_.begin()->first.first > std::chrono::steady_clock::now()) {
        const auto until = alarms_.begin()->first.first;
        wake_.wait_until(lock, until);
      } else {
        std::function<void()> task = std::move(alarms_.begin()->second);
        alarms_.erase(alarms_.begin());
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<Alarm, std::function<void()>> alarms_;
  int64_t next_ = 0;
};

// Both live until the process ends: their threads are never joined.
ThreadCache& threads() {
  static ThreadCache* cache = new ThreadCache;
  return *cache;
}

AlarmClock& clock() {
  static AlarmClock* clock = new AlarmClock;
  return *clock;
}

struct Loop {
  Loop(int64_t n, const std::function<void(int64_t)>& f) : n(n), f(&f) {}

  void work() {
    for (;;) {
      // f is not touched after the last index is taken: the caller may have returned by then.
      const int64_t i = next.fetch_add(1);
      if (i >= n) return;
      (*f)(i);
      if (done.fetch_add(1) + 1 == n) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_one();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load() == n; });
  }

  const int64_t n;
  const std::function<void(int64_t)>* f;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
};

}  // namespace

void run_on_thread(std::function<void()> task) { threads().run(std::move(task)); }

void parallel_for(int64_t n, int64_t cost, const std::function<void(int64_t)>& f) {
  static const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const int64_t threads = n * cost < kSerialCost ? 1 : std::min(cores, n);
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  auto loop = std::make_shared<Loop>(n, f);
  for (int64_t t = 1; t < threads; ++t) run_on_thread([loop] { loop->work(); });
  loop->work();
  loop->wait();
}

Alarm set_alarm(double seconds, std::function<void()> task) {
  return clock().set(seconds, std::move(task));
}

void cancel_alarm(const Alarm& alarm) { clock().cancel(alarm); }

}  // namespace megamoe
