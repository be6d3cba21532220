#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#ifndef _WIN32
#include <dlfcn.h>
#include <pthread.h>
#endif

namespace deepmemory {

namespace {

struct Job {
  std::atomic<int64_t> next{0};
  int64_t tasks;
  void (*work)(void*, int64_t);
  void* context;

  Job(int64_t t, void (*w)(void*, int64_t), void* c) : tasks(t), work(w), context(c) {}

  static void take_tasks(void* job) {
    Job& self = *static_cast<Job*>(job);
    for (int64_t task; (task = self.next.fetch_add(1, std::memory_order_relaxed)) < self.tasks;)
      self.work(self.context, task);
  }
};

class Pool {
 public:
  std::mutex in_use;  // held by the caller whose job is running

  void run(Job& job, int64_t threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      seats_ = threads - 1;
      hire(seats_);
    }
    wake_.notify_all();
    Job::take_tasks(&job);
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // who has not begun need not begin any more
    idle_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  Job* job_ = nullptr;
  int64_t seats_ = 0;  // workers that may still join the job at hand
  int64_t busy_ = 0;   // workers that have joined
  int64_t hired_ = 0;

  void hire(int64_t wanted) {
    try {
      for (; hired_ < wanted; hired_++) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // No more threads to be had: the others do the work.
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return seats_ > 0; });
      seats_--;
      busy_++;
      Job* job = job_;
      lock.unlock();
      Job::take_tasks(job);
      lock.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }
};

// torch's own OpenMP threads, where they can be had: they spin for milliseconds after each of torch's loops, and a
// thread of ours that wakes meanwhile waits for a core. GOMP_parallel is what GCC's, Intel's and LLVM's runtimes
// all offer; torch loads its runtime's symbols for everyone to see.
using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

OpenMpParallel find_openmp() {
#ifdef _WIN32
  return nullptr;
#else
  return reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
}

// Never destroyed: detached workers may outlive the library's other statics at exit.
std::atomic<Pool*> pool{new Pool};

// A child has none of its parent's threads, and neither our locks nor the OpenMP runtime know it: it starts afresh,
// with a pool of its own. Registered when the library loads, as torch may have used its threads before we do.
std::atomic<bool> forked{false};
#ifndef _WIN32
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  pool = new Pool;
  forked = true;
});
#endif

}  // namespace

void run_tasks(int64_t tasks, int64_t threads, void (*work)(void*, int64_t), void* context) {
  Job job(tasks, work, context);
  if (threads > tasks) threads = tasks;
  if (threads > 1) {
    static const OpenMpParallel openmp = find_openmp();
    if (openmp && !forked) return openmp(Job::take_tasks, &job, unsigned(threads), 0);
    Pool& shared = *pool;
    std::unique_lock<std::mutex> mine(shared.in_use, std::try_to_lock);
    if (mine.owns_lock()) return shared.run(job, threads);
  }
  Job::take_tasks(&job);
}

}  // namespace deepmemory
