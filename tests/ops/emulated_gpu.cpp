// Every CUDA thread is a coroutine that runs until it has to wait at a barrier. Blocks of a cluster run together, clusters
// one after another. The order in which threads get their turn is shuffled: a result that depends on it, because a barrier
// is missing, is a wrong result here too.
#include "emulated_gpu.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <ucontext.h>
#include <utility>
#include <vector>

Thread* self;

namespace {
ucontext_t scheduler;
bool moved;  // something happened that a thread may wait for, since the threads last had a turn each

struct Coroutine;
Coroutine& current();

struct Barrier {
    int expected, arrived = 0, generation = 0;
    void arrive_and_wait();
};
struct Warp {
    Barrier lanes{32};
    unsigned a[32][4], b[32][2];
    bool flag[32];
};
struct Copy {
    void* to;
    const void* from;
    int size;
};
std::map<Arrival*, Copy> copies;  // on their way

struct Store {
    unsigned* to;
    unsigned word;
    Thread* by;
    bool held;  // until its thread's next fence
};
std::vector<Store> stores;  // to global memory, on their way
constexpr unsigned POISON = 0xffffffffu;
unsigned random_bits = 1;
unsigned draw() { return (random_bits = random_bits * 1664525u + 1013904223u) >> 8; }

// Makes those visible that `now` is true of.
template <class Which> void let_arrive(Which now) {
    std::vector<Store> left;
    for (const Store& store : stores) {
        if (now(store)) *store.to = store.word;
        else left.push_back(store);
    }
    stores.swap(left);
}

struct Coroutine : Thread {
    int rank;
    Warp* warp;
    ucontext_t context = {};
    bool done = false;
};
struct Cluster {
    std::vector<std::vector<float>> shared;
    std::vector<Barrier> blocks;
    std::vector<Warp> warps;
    Barrier all;
};
Cluster* cluster;

Coroutine& current() { return *static_cast<Coroutine*>(self); }

void Barrier::arrive_and_wait() {
    const int mine = generation;
    moved = true;
    if (++arrived == expected) arrived = 0, ++generation;
    while (generation == mine) swapcontext(&current().context, &scheduler);
}

void (*kernel_of_all)(const void*);
const void* arguments_of_all;

void run_cluster(std::vector<Coroutine>& threads) {
    constexpr int stack_size = 1 << 16;
    std::vector<char> stacks(threads.size() * stack_size);
    std::vector<Coroutine*> turns;
    for (Coroutine& thread : threads) {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = &stacks[turns.size() * stack_size];
        thread.context.uc_stack.ss_size = stack_size;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, [] { kernel_of_all(arguments_of_all), current().done = moved = true; }, 0);
        turns.push_back(&thread);
    }
    while (!turns.empty()) {
        moved = false;
        std::vector<Coroutine*> left;
        for (size_t k = turns.size(); k--;) {
            std::swap(turns[k], turns[draw() % (k + 1)]);
            self = turns[k];
            swapcontext(&scheduler, &turns[k]->context);
            if (!turns[k]->done) left.push_back(turns[k]);
        }
        let_arrive([](const Store& store) {
            moved |= !store.held;
            return !store.held && draw() >> 22 == 0;
        });
        if (!moved) std::fputs("emulated_gpu.cpp: threads wait for something that others never do\n", stderr), std::abort();
        turns.swap(left);
    }
    stores.clear();
}
}  // namespace

void warp_barrier() { current().warp->lanes.arrive_and_wait(); }
// At times somebody goes on late: the others do not wait for it before the next barrier.
void block_barrier() {
    cluster->blocks[current().rank].arrive_and_wait();
    if (draw() % 4 == 0) pause_at_times();
}
void cluster_barrier() { cluster->all.arrive_and_wait(); }

void start_copy(void* to, const void* from, int size, Arrival* arrival) {
    if (copies.count(arrival)) std::fputs("emulated_gpu.cpp: two copies count at one barrier\n", stderr), std::abort();
    std::memset(to, 0xff, size);
    copies[arrival] = {to, from, size};
}
void wait_for(Arrival* arrival, unsigned parity) {  // an Arrival counts how often something has arrived
    while (*arrival % 2 == parity) {
        if (const auto copy = copies.find(arrival); copy != copies.end()) {
            std::memcpy(copy->second.to, copy->second.from, copy->second.size);
            copies.erase(copy);
            ++*arrival;
        } else {
            swapcontext(&current().context, &scheduler);
        }
    }
}

void store_in_global(unsigned* to, unsigned word) { stores.push_back({to, word, self, word == POISON && draw() >> 23}); }
void gpu_fence() {
    let_arrive([](const Store& store) { return store.by == self; });
}
void let_others_run() { swapcontext(&current().context, &scheduler); }
void pause_at_times() {
    for (int turns = draw() % 64 ? 0 : 40; turns; --turns) moved = true, let_others_run();
}

unsigned in_lanes(bool flag) {
    Warp& warp = *current().warp;
    warp.flag[self->index % 32] = flag;
    warp_barrier();
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= unsigned(warp.flag[lane]) << lane;
    warp_barrier();
    return all;
}

void must_begin_at_a_multiple(const void* memory, int bytes) {
    if (reinterpret_cast<size_t>(memory) % bytes == 0) return;
    std::fprintf(stderr, "emulated_gpu.cpp: %d bytes at once that do not begin at a multiple of it\n", bytes), std::abort();
}

void store_in_all_blocks(void* target, const void* value, int size) {
    const auto offset = static_cast<char*>(target) - reinterpret_cast<char*>(self->shared);
    for (auto& shared : cluster->shared) std::memcpy(reinterpret_cast<char*>(shared.data()) + offset, value, size);
}

void emulate(int cluster_size, int width_of_block, int blocks, int runs, int shared_floats, void (*kernel)(const void*),
             const void* arguments) {
    kernel_of_all = kernel, arguments_of_all = arguments, random_bits = 1;
    for (int y = 0; y < runs; ++y)
        for (int first = 0; first < blocks; first += cluster_size) {
            // Fresh shared memory holds anything: NaN shows what is read before it was written.
            const std::vector<float> unwritten(shared_floats, std::nanf(""));
            Cluster here{std::vector<std::vector<float>>(cluster_size, unwritten),
                         std::vector<Barrier>(cluster_size, Barrier{width_of_block}),
                         std::vector<Warp>(cluster_size * width_of_block / 32), Barrier{cluster_size * width_of_block}};
            cluster = &here;
            std::vector<Coroutine> threads;
            for (int rank = 0; rank < cluster_size; ++rank)
                for (int t = 0; t < width_of_block; ++t) {
                    Warp& warp = here.warps[(rank * width_of_block + t) / 32];
                    const Thread thread{t, first + rank, y, here.shared[rank].data(), warp.a, warp.b};
                    threads.push_back({thread, rank, &warp});
                }
            run_cluster(threads);
            if (!copies.empty()) std::fputs("emulated_gpu.cpp: a block ends before all copies to it\n", stderr), std::abort();
        }
}
