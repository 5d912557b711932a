// Threads that stay together through many small jobs, such as all products of a step.
//
// The driver goes on when a job's work is done, not when every thread has come by: a thread that the system keeps off
// its core holds nobody up unless it has begun. With a barrier after each job it would, some hundred times a step.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace headrace {

class Team {
 public:
  // Let all threads take part in `function`, which shares its work out itself, by counters; returns when it is done.
  template <typename Function>
  void run(const Function& function) {
    function_ = [](const void* context) { (*static_cast<const Function*>(context))(); };
    context_ = &function;
    const uint64_t opened = next_job_;
    next_job_ += kJob;
    gate_.store(opened | kOpen, std::memory_order_release);
    function();
    // Whoever has not begun by now stays out.
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int turn = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++turn) wait(turn);
  }

  // What every thread but the driver does, until `finish`.
  void help() {
    uint64_t done = 0;
    for (int turn = 0; !is_finished_.load(std::memory_order_acquire); ++turn) {
      uint64_t state = gate_.load(std::memory_order_acquire);
      const uint64_t job = state & ~(kOpen | kInside);
      if ((state & kOpen) == 0 || job == done) {
        wait(turn);
        continue;
      }
      if (!gate_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      function_(context_);
      gate_.fetch_sub(1, std::memory_order_acq_rel);
      done = job;
      turn = 0;
    }
  }

  void finish() { is_finished_.store(true, std::memory_order_release); }

 private:
  // The gate: how many are inside, whether it is open, which job it is.
  static constexpr uint64_t kInside = 0xffff, kOpen = 0x10000, kJob = 0x20000;

  static void wait(int turn) {
    // The core is left to others now and then: one of them may hold what is waited for.
    if (turn % 1024 == 1023) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  std::atomic<uint64_t> gate_{0};
  std::atomic<bool> is_finished_{false};
  uint64_t next_job_ = kJob;
  void (*function_)(const void*) = nullptr;
  const void* context_ = nullptr;
};

// The team that the calling thread drives, if any.
inline thread_local Team* driven_team = nullptr;

// Lets `num_threads` threads take part in `function`, which shares its work out itself.
template <typename Function>
void in_parallel(int num_threads, const Function& function) {
  if (num_threads <= 1) return function();
  if (driven_team) return driven_team->run(function);
#pragma omp parallel num_threads(num_threads)
  function();
}

// Calls `function` with a team behind it: all `in_parallel` inside is done by the same threads.
template <typename Function>
void with_team(int num_threads, const Function& function) {
  if (num_threads <= 1) return function();
  Team team;
#pragma omp parallel num_threads(num_threads)
  {
    if (omp_get_thread_num() == 0) {
      driven_team = &team;
      function();
      driven_team = nullptr;
      team.finish();
    } else {
      team.help();
    }
  }
}

// Splits `count` things between threads if there is enough to do.
template <typename Function>
void share(int64_t count, int64_t work_per_thing, int num_threads, const Function& function) {
  constexpr int64_t kLeastWork = 16384;  // numbers; below, starting a thread costs more than it saves
  const int64_t useful = count * work_per_thing / kLeastWork;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>({num_threads, count, useful}));
  if (parts == 1) return function(0, count);
  int64_t next_part = 0;
  in_parallel(int(parts), [&] {
    for (;;) {
      const int64_t part = __atomic_fetch_add(&next_part, 1, __ATOMIC_RELAXED);
      if (part >= parts) return;
      function(count * part / parts, count * (part + 1) / parts);
    }
  });
}

}  // namespace headrace
