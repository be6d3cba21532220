// The C interface that deepmemory/ops/cpu/__init__.py loads.
#include <atomic>
#include <cstring>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef DM_X86
#include <cpuid.h>
#endif

#include "plan.h"
#include "pool.h"

#ifdef _WIN32
#define DM_EXPORT extern "C" __declspec(dllexport)
#else
#define DM_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace deepmemory {

namespace {

#ifdef DM_X86
// Asked of the processor itself: __builtin_cpu_supports needs a runtime library that not every compiler brings.
// `features` are bits of leaf 7's EBX, `registers` those of XCR0 that the operating system saves.
bool processor_has(unsigned features, unsigned registers) {
  constexpr unsigned fma = 1u << 12, osxsave = 1u << 27;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (fma | osxsave)) != (fma | osxsave)) return false;
  unsigned saved, high;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  return (saved & registers) == registers && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & features) == features;
}
constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
constexpr unsigned kYmm = 0x6, kZmm = 0xe6;
#endif

struct Level {
  const char* name;
  const Kernels* kernels;
  bool (*runs_here)();
};

const Level levels[] = {
    {"baseline", baseline::kernels, [] { return true; }},
#ifdef DM_X86
    {"avx2", avx2::kernels, [] { return processor_has(kAvx2, kYmm); }},
    {"avx512", avx512::kernels, [] { return processor_has(kAvx512, kZmm); }},
#endif
};
constexpr int kLevels = sizeof(levels) / sizeof(levels[0]);

int best_level() {
  int best = 0;
  for (int i = 0; i < kLevels; i++)
    if (levels[i].runs_here()) best = i;
  return best;
}

std::atomic<int> level{-1};

const Kernels& kernels_for(const Call& call) {
  int chosen = level;
  if (chosen < 0) level = chosen = best_level();
  return levels[chosen].kernels[call.is_double];
}

struct Block {
  void* at;
  explicit Block(size_t bytes) : at(::operator new(bytes, std::align_val_t(64), std::nothrow)) {}
  ~Block() { ::operator delete(at, std::align_val_t(64)); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
};

// Large outputs are fresh memory: with huge pages the first touch costs a fraction of what it does with small ones.
void expect_writes(void* at, int64_t elements, const Call& call) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t huge = 1 << 21;
  const uintptr_t bytes = uintptr_t(elements) * (call.is_double ? 8 : 4);
  const uintptr_t first = (uintptr_t(at) + huge - 1) / huge * huge, last = (uintptr_t(at) + bytes) / huge * huge;
  if (at && last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)at, (void)elements, (void)call;
#endif
}

}  // namespace

}  // namespace deepmemory

using namespace deepmemory;

// Name of the i-th level, or null past the last one; *usable tells whether this processor has it.
DM_EXPORT const char* dm_level(int64_t i, int64_t* usable) {
  if (i >= kLevels) return nullptr;
  *usable = levels[i].runs_here();
  return levels[i].name;
}

DM_EXPORT void dm_use_level(int64_t i) { level = i < 0 ? best_level() : int(i); }

// Elements of the trace per row and step, negative where the batch is padded to whole tiles of 16 lanes.
DM_EXPORT int64_t dm_record(const Call* call) {
  const Plan plan(*call);
  return plan.lanes ? -(plan.record / kLanes) : plan.record;
}

namespace {

bool forward(const Call* call) {
  Plan plan(*call);
  plan.share();
  if (call->trace) std::memset(call->trace, 0, kTraceHeader * (call->is_double ? 8 : 4));
  const int64_t rows = call->runs * call->steps * call->batch;
  expect_writes(call->y, rows * call->width, *call);
  expect_writes(call->trace, (plan.lanes ? call->runs * call->steps * plan.tiles : rows) * plan.record, *call);
  const Kernels& kernels = kernels_for(*call);
  std::atomic<bool> fine{true};
  auto work = [&](int64_t part) {
    if (!kernels.forward(plan, part)) fine = false;
  };
  parallel(call->runs * plan.parts, call->threads, work);
  return fine;
}

bool backward(const Call* call) {
  Plan plan(*call);
  plan.share();
  const Kernels& kernels = kernels_for(*call);
  expect_writes(call->grad_x, call->runs * call->steps * call->batch * call->inputs, *call);
  const size_t bytes = size_t(kernels.gradient_size(plan)) * (call->is_double ? 8 : 4);
  std::atomic<bool> fine{true};

  if (plan.parts == 1) {  // a run's gradients are complete when its only part is
    auto work = [&](int64_t run) {
      Block sums(bytes * (plan.groups > 1 ? 2 : 1));
      if (!sums.at || !kernels.backward(plan, run, sums.at)) {
        fine = false;
        return;
      }
      for (int64_t i = 0; i < plan.linears; i++) kernels.write_gradients(plan, run, i, sums.at, 1);
    };
    parallel(call->runs, call->threads, work);
    return fine;
  }

  Block block(bytes * size_t(call->runs * plan.groups));
  if (!block.at) return false;
  auto sums = [&](int64_t run, int64_t group) {
    return static_cast<char*>(block.at) + bytes * size_t(run * plan.groups + group);
  };
  auto work = [&](int64_t part) {
    if (!kernels.backward(plan, part, sums(part / plan.parts, plan.first_group(part % plan.parts)))) fine = false;
  };
  parallel(call->runs * plan.parts, call->threads, work);
  if (!fine) return false;
  auto collect = [&](int64_t task) {
    const int64_t run = task / plan.linears;
    kernels.write_gradients(plan, run, task % plan.linears, sums(run, 0), plan.groups);
  };
  parallel(call->runs * plan.linears, call->threads, collect);
  return true;
}

// 0, or 1 if memory ran out: no exception may leave a C function.
int64_t guarded(bool (*run)(const Call*), const Call* call) {
  try {
    return run(call) ? 0 : 1;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

DM_EXPORT int64_t dm_forward(const Call* call) { return guarded(forward, call); }
DM_EXPORT int64_t dm_backward(const Call* call) { return guarded(backward, call); }
