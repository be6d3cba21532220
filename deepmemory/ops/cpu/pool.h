// Threads for independent tasks: torch's own OpenMP threads, or in a forked child a small pool of ours.
// Never a second OpenMP runtime.
#pragma once

#include <cstdint>

namespace deepmemory {

// Calls work(context, 0 ... tasks - 1) on up to `threads` threads, the caller's included, and returns when all
// are done. Tasks are taken as threads come free. While another caller has the pool, the tasks run on the calling
// thread alone.
void run_tasks(int64_t tasks, int64_t threads, void (*work)(void* context, int64_t task), void* context);

template <class F>
void parallel(int64_t tasks, int64_t threads, F& work) {
  run_tasks(tasks, threads, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &work);
}

}  // namespace deepmemory
