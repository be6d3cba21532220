#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace deepmemory {

namespace {

class Pool {
 public:
  std::mutex in_use;  // held by the caller whose tasks are running

  void run(int64_t tasks, int64_t threads, void (*work)(void*, int64_t), void* context) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = work;
      context_ = context;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      seats_ = (threads < tasks ? threads : tasks) - 1;
      hire(seats_);
    }
    wake_.notify_all();
    take_tasks();
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // who has not begun need not begin any more
    idle_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::atomic<int64_t> next_{0};
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  int64_t seats_ = 0;  // workers that may still join the tasks at hand
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
      lock.unlock();
      take_tasks();
      lock.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  void take_tasks() {
    for (;;) {
      const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks_) return;
      work_(context_, task);
    }
  }
};

// Never destroyed: detached workers may outlive the library's other statics at exit.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
#ifndef _WIN32
    // A child has none of the threads and whatever state the locks were in: it starts afresh.
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif
  });
  return *pool;
}

}  // namespace

void run_tasks(int64_t tasks, int64_t threads, void (*work)(void*, int64_t), void* context) {
  if (tasks > 1 && threads > 1) {
    Pool& shared = the_pool();
    std::unique_lock<std::mutex> mine(shared.in_use, std::try_to_lock);
    if (mine.owns_lock()) return shared.run(tasks, threads, work, context);
  }
  for (int64_t task = 0; task < tasks; task++) work(context, task);
}

}  // namespace deepmemory
