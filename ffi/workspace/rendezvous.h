// Where the ranks of one process meet on the host.
//
// No thread waits. A rank that arrives leaves its operands and a promise; the last one takes the
// operands of all ranks and does the work for the whole group, then keeps the promises of the
// others. Threads that waited could starve XLA:CPU: its executor may start independent calls in
// another order on each device, and with fewer threads than (device, call) pairs all of them could
// hold ranks of calls whose remaining ranks never get a thread.
#ifndef JAX_MEGAMOE_FFI_WORKSPACE_RENDEZVOUS_H_
#define JAX_MEGAMOE_FFI_WORKSPACE_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ffi/workspace/threads.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

// One call site of one executable. A call is named by its execution (run) and expert group; the
// n-th arrival of a rank under one name belongs to the n-th call, as in a loop.
template <class Operands>
class Rendezvous {
 public:
  using Error = xla::ffi::Error;
  using Future = xla::ffi::Future;
  using Promise = xla::ffi::Promise;
  // Does the work of all ranks; operands[r] came from rank r.
  using Work = std::function<Error(const std::vector<Operands>& operands)>;

  // `phase` names what the ranks wait for in messages.
  Rendezvous(int32_t ranks, double timeout_s, std::string phase)
      : ranks_(ranks), timeout_s_(timeout_s), phase_(std::move(phase)) {}

  // The future is ready when the group's work is done, or failed for every rank of the group.
  // Throws if the system lacks what it needs; the rank then has not arrived.
  Future arrive(int64_t run, int64_t group, int32_t rank, const Operands& operands,
                const Work& work) {
    std::shared_ptr<Meeting> meeting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      meeting = find(run, group, [rank](const Meeting& m) { return !m.arrived[rank]; });
      std::lock_guard<std::mutex> meeting_lock(meeting->mutex);
      if (meeting->num_arrived == 0 && ranks_ > 1) {
        meeting->alarm = set_alarm(timeout_s_, [names = names(), weak = std::weak_ptr(meeting)] {
          if (auto late = weak.lock()) names.time_out(*late);
        });
      }
      meeting->arrived[rank] = true;
      ++meeting->num_arrived;
      const bool last = meeting->num_arrived == ranks_;
      if (last) forget(run, group, meeting);
      if (meeting->failure.has_value()) {
        return ready(Error(*meeting->failure->errc(),
                           name_of(rank) + " came to phase '" + phase_ +
                               "' after the call had failed: " + meeting->failure->message()));
      }
      meeting->operands[rank] = operands;
      if (!last) {
        meeting->promises[rank].emplace();
        return Future(*meeting->promises[rank]);
      }
      meeting->closed = true;
    }
    if (ranks_ > 1) cancel_alarm(meeting->alarm);
    const Error result = work(meeting->operands);
    keep_promises(meeting->promises, [&](int32_t) { return result; });
    return ready(result);
  }

  // Ends the call for the ranks that wait and for those that will still come, when one of them
  // failed before it could say which it is.
  void fail(int64_t run, int64_t group, const Error& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::shared_ptr<Meeting> meeting = find(run, group, [](const Meeting&) { return true; });
    std::lock_guard<std::mutex> meeting_lock(meeting->mutex);
    if (++meeting->num_arrived == ranks_) forget(run, group, meeting);
    if (meeting->failure.has_value()) return;
    meeting->failure = error;
    keep_promises(meeting->promises, [&](int32_t) { return error; });
  }

 private:
  struct Meeting {
    explicit Meeting(int32_t ranks) : arrived(ranks), promises(ranks), operands(ranks) {}

    std::mutex mutex;
    std::vector<bool> arrived;
    std::vector<std::optional<Promise>> promises;
    std::vector<Operands> operands;
    std::optional<Error> failure;
    Alarm alarm;
    int32_t num_arrived = 0;
    bool closed = false;  // all ranks are here and the work has begun
  };

  // What an alarm needs to know; an alarm may outlive the executable.
  struct CallNames {
    int32_t ranks;
    double timeout_s;
    std::string phase;

    void time_out(Meeting& meeting) const {
      std::lock_guard<std::mutex> lock(meeting.mutex);
      if (meeting.closed || meeting.failure.has_value()) return;
      std::string missing;
      int32_t num_missing = 0;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        if (meeting.arrived[rank]) continue;
        missing += (num_missing++ ? ", " : "") + std::to_string(rank);
      }
      const auto message = [&](int32_t rank) {
        std::ostringstream text;
        text << "rank " << rank << " of " << ranks << " waited " << timeout_s << " s in phase '"
             << phase << "' for rank" << (num_missing > 1 ? "s " : " ") << missing
             << "; every rank of the expert axis must make the same calls";
        return text.str();
      };
      for (int32_t rank = 0; rank < ranks && !meeting.failure.has_value(); ++rank) {
        if (meeting.arrived[rank]) {
          meeting.failure = Error(xla::ffi::ErrorCode::kDeadlineExceeded, message(rank));
        }
      }
      keep_promises(meeting.promises, [&](int32_t rank) {
        return Error(xla::ffi::ErrorCode::kDeadlineExceeded, message(rank));
      });
    }
  };

  CallNames names() const { return CallNames{ranks_, timeout_s_, phase_}; }

  std::string name_of(int32_t rank) const {
    return "rank " + std::to_string(rank) + " of " + std::to_string(ranks_);
  }

  static Future ready(const Error& result) {
    Promise promise;
    Future future(promise);
    keep(promise, result);
    return future;
  }

  static void keep(Promise& promise, const Error& result) {
    if (result.success()) {
      promise.SetAvailable();
    } else {
      promise.SetError(result);
    }
  }

  // A kept promise continues its device's program at once, on the thread that keeps it. Each gets
  // its own, because the programs may wait for each other further on.
  template <class Result>
  static void keep_promises(std::vector<std::optional<Promise>>& promises, const Result& result) {
    for (size_t rank = 0; rank < promises.size(); ++rank) {
      if (!promises[rank].has_value()) continue;
      run_on_thread(
          [promise = *std::exchange(promises[rank], std::nullopt),
           error = result(static_cast<int32_t>(rank))]() mutable { keep(promise, error); });
    }
  }

  // The first call of this name that is wanted, or a new one. A failed call stays until all its
  // ranks have come, so that none of them is taken for a rank of the next.
  template <class Wanted>
  std::shared_ptr<Meeting> find(int64_t run, int64_t group, const Wanted& wanted) {
    auto& calls = calls_[{run, group}];
    for (const auto& meeting : calls) {
      if (wanted(*meeting)) return meeting;
    }
    calls.push_back(std::make_shared<Meeting>(ranks_));
    return calls.back();
  }

  void forget(int64_t run, int64_t group, const std::shared_ptr<Meeting>& meeting) {
    auto& calls = calls_[{run, group}];
    for (auto it = calls.begin(); it != calls.end(); ++it) {
      if (*it == meeting) {
        calls.erase(it);
        break;
      }
    }
    if (calls.empty()) calls_.erase({run, group});
  }

  const int32_t ranks_;
  const double timeout_s_;
  const std::string phase_;
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, std::vector<std::shared_ptr<Meeting>>> calls_;
};

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_WORKSPACE_RENDEZVOUS_H_
