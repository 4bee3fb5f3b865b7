// Host threads of the library, apart from XLA's: work never waits for a thread of XLA's pools.
#ifndef JAX_MEGAMOE_FFI_WORKSPACE_THREADS_H_
#define JAX_MEGAMOE_FFI_WORKSPACE_THREADS_H_

#include <chrono>
#include <cstdint>
#include <functional>

namespace megamoe {

// Runs `task` on a thread of its own; threads are kept and used again. Runs it here if the system
// gives no thread.
void run_on_thread(std::function<void()> task);

// Calls f(0) ... f(n - 1), on at most one thread a core. The caller works too, so it never waits
// for a thread to become free. Stays on this thread if n * cost (multiply-adds of one call) is
// small.
void parallel_for(int64_t n, int64_t cost, const std::function<void(int64_t)>& f);

// Calls `task` after `seconds`, unless the returned alarm is cancelled before.
using Alarm = std::pair<std::chrono::steady_clock::time_point, int64_t>;
Alarm set_alarm(double seconds, std::function<void()> task);
void cancel_alarm(const Alarm& alarm);

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_WORKSPACE_THREADS_H_
