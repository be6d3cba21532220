// Runs the CUDA source of deepmemory/ops/nvrtc on the CPU, so that its arithmetic and its barriers can be tested without a
// GPU. Every CUDA thread is a coroutine that runs until it has to wait at a barrier. Blocks of a cluster run together,
// clusters one after another. The order in which threads get their turn is shuffled: a result that depends on it, because
// a barrier is missing, is a wrong result here too.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define DEVICE inline
typedef long long int64;

struct Warp;
struct Thread {
    int index, x, y, rank;
    Warp* warp;
    float* shared;
    ucontext_t context;
    bool done;
};
Thread* self;
ucontext_t scheduler;
bool moved;  // a thread reached a barrier or its end since the threads last had a turn each

struct Barrier {
    int expected, arrived = 0, generation = 0;
    void arrive_and_wait() {
        const int mine = generation;
        moved = true;
        if (++arrived == expected) arrived = 0, ++generation;
        while (generation == mine) swapcontext(&self->context, &scheduler);
    }
};
struct Warp {
    Barrier lanes{32};
    unsigned a[32][4], b[32][2];
    bool flag[32];
};
struct Cluster {
    std::vector<std::vector<float>> shared;
    std::vector<Barrier> blocks;
    std::vector<Warp> warps;
    Barrier all;
};
Cluster* cluster;

#define shared_memory (self->shared)
inline int thread_index() { return self->index; }
inline int block_x() { return self->x; }
inline int block_y() { return self->y; }
inline float power_of_two(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline float coarse_tanh(float x) { return std::tanh(x); }
template <class To, class From> To same_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned bits_of(float x) { return same_bits<unsigned>(x); }
inline float float_of(unsigned bits) { return same_bits<float>(bits); }
inline unsigned in_lanes(bool flag) {
    Warp& warp = *self->warp;
    warp.flag[self->index % 32] = flag;
    warp.lanes.arrive_and_wait();
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= unsigned(warp.flag[lane]) << lane;
    warp.lanes.arrive_and_wait();
    return all;
}
inline void block_barrier() { cluster->blocks[self->rank].arrive_and_wait(); }
inline void cluster_barrier() { cluster->all.arrive_and_wait(); }
inline void open_exchange() {}
inline void receive(int, int) { cluster_barrier(); }
inline float round_to_tf32(float x) { return float_of((bits_of(x) + 0x1000) & ~0x1fffu); }

struct Half;
struct Quad;
struct Words;
struct BFloat16;
inline float to_float(Half);
inline void round_to(Half&, float);
inline void round_to(BFloat16&, float);
inline Quad from_l2(const Quad* at);
template <int, class Input> void send_to_all(Input* target, Input value, bool there, int) {
    if (!there) return;
    const auto offset = reinterpret_cast<char*>(target) - reinterpret_cast<char*>(shared_memory);
    for (auto& shared : cluster->shared) std::memcpy(reinterpret_cast<char*>(shared.data()) + offset, &value, sizeof value);
}
template <class Input> void multiply_tile(float* sum, const Words& a, unsigned b0, unsigned b1, Input);

#include "numbers.cuh"

inline float to_float(Half x) { return float(same_bits<_Float16>(x.bits)); }
inline void round_to(Half& to, float x) { to.bits = same_bits<unsigned short>(_Float16(x)); }
inline void round_to(BFloat16& to, float x) {  // to the nearest, ties to even
    const unsigned bits = bits_of(x);
    to.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline Quad from_l2(const Quad* at) { return *at; }
// As PTX's manual places the elements of m16n8k16 (two bytes) and m16n8k8 (four) in the lanes' registers.
template <class Input> void multiply_tile(float* sum, const Words& a, unsigned b0, unsigned b1, Input) {
    constexpr int in_word = 4 / sizeof(Input), inputs = 8 * in_word;
    Warp& warp = *self->warp;
    const int lane = self->index % 32;
    const unsigned of_a[] = {a.x, a.y, a.z, a.w}, of_b[] = {b0, b1};
    std::memcpy(warp.a[lane], of_a, sizeof of_a), std::memcpy(warp.b[lane], of_b, sizeof of_b);
    warp.lanes.arrive_and_wait();
    const auto element = [](unsigned word, int place) {
        Input input;
        std::memcpy(&input, reinterpret_cast<char*>(&word) + place * sizeof input, sizeof input);
        return to_float(input);
    };
    for (int k = 0; k < 4; ++k) {
        const int output = lane / 4 + k / 2 * 8, row = lane % 4 * 2 + k % 2;
        for (int i = 0; i < inputs; ++i) {
            const int later = i / (inputs / 2), lane_of = i % (inputs / 2) / in_word;
            sum[k] += element(warp.a[output % 8 * 4 + lane_of][output / 8 + 2 * later], i % in_word) *
                      element(warp.b[row * 4 + lane_of][later], i % in_word);
        }
    }
    warp.lanes.arrive_and_wait();
}

#include "layout.cuh"
#include "panels.cuh"
#include "elementwise.cuh"
#include "sweeps.cuh"
#include "products.cuh"

template <class Run> void run_cluster(std::vector<Thread>& threads, Run& run) {
    static Run* what;
    what = &run;
    constexpr int stack_size = 1 << 16;
    std::vector<char> stacks(threads.size() * stack_size);
    std::vector<Thread*> turns;
    for (Thread& thread : threads) {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = &stacks[turns.size() * stack_size];
        thread.context.uc_stack.ss_size = stack_size;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, [] { (*what)(), self->done = moved = true; }, 0);
        turns.push_back(&thread);
    }
    for (unsigned random = 1; !turns.empty();) {
        moved = false;
        std::vector<Thread*> left;
        for (size_t k = turns.size(); k--;) {
            random = random * 1664525u + 1013904223u;
            std::swap(turns[k], turns[(random >> 8) % (k + 1)]);
            self = turns[k];
            swapcontext(&scheduler, &self->context);
            if (!self->done) left.push_back(self);
        }
        if (!moved) std::fputs("emulate.cpp: threads wait at a barrier that others never reach\n", stderr), std::abort();
        turns.swap(left);
    }
}

template <int BLOCKS, int WIDTH_OF_BLOCK, class Run>
void emulate(int blocks, int runs, int shared_floats, Run run) {
    for (int y = 0; y < runs; ++y)
        for (int first = 0; first < blocks; first += BLOCKS) {
            // Fresh shared memory holds anything: NaN shows what is read before it was written.
            Cluster here{{BLOCKS, std::vector<float>(shared_floats, std::nanf(""))},
                         {BLOCKS, Barrier{WIDTH_OF_BLOCK}},
                         std::vector<Warp>(BLOCKS * WIDTH_OF_BLOCK / 32),
                         Barrier{BLOCKS * WIDTH_OF_BLOCK}};
            cluster = &here;
            std::vector<Thread> threads;
            for (int rank = 0; rank < BLOCKS; ++rank)
                for (int t = 0; t < WIDTH_OF_BLOCK; ++t)
                    threads.push_back({t, first + rank, y, rank, &here.warps[(rank * WIDTH_OF_BLOCK + t) / 32],
                                       here.shared[rank].data()});
            run_cluster(threads, run);
        }
}

extern "C" void sweep_forward(const Arguments* a, int blocks, int runs) {
    emulate<CLUSTER, THREADS>(blocks, runs, shared_size<false>(), [&] { Forward(*a).run_all(); });
}
extern "C" void sweep_backward(const Arguments* a, int blocks, int runs) {
    emulate<CLUSTER, THREADS>(blocks, runs, shared_size<true>(), [&] { Backward(*a).run_all(); });
}
extern "C" void sum_products(const Products* p, int blocks, int runs) {
    emulate<1, PRODUCT_THREADS>(blocks, runs, PRODUCTS_SHARED, [&] { ProductTile(*p).run_all(); });
}
extern "C" int shared_bytes(int back) { return 4 * (back ? shared_size<true>() : shared_size<false>()); }
extern "C" int streamed_quads(int back) { return back ? streamed_size<true>() : streamed_size<false>(); }
extern "C" int arguments_bytes() { return sizeof(Arguments); }
extern "C" int products_bytes() { return sizeof(Products); }
extern "C" int products_shared_bytes() { return 4 * PRODUCTS_SHARED; }
