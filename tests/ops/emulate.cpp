// Runs deepmemory/ops/nvrtc/sweep.cu on the CPU, a thread for a thread, so that its arithmetic and its barriers can be
// tested without a GPU. Blocks of a cluster run together, clusters one after another.
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>

#define EMULATED
#define DEVICE inline
typedef long long int64;

struct Cluster {
    std::vector<std::vector<float>> shared;
    std::vector<std::unique_ptr<std::barrier<>>> blocks;
    std::unique_ptr<std::barrier<>> all;
};
thread_local Cluster* cluster;
thread_local float* shared_memory;
thread_local int my_thread, my_x, my_y, my_rank;

inline int thread_index() { return my_thread; }
inline int block_x() { return my_x; }
inline int block_y() { return my_y; }
inline float power_of_two(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline void block_barrier() { cluster->blocks[my_rank]->arrive_and_wait(); }
inline void cluster_barrier() { cluster->all->arrive_and_wait(); }
inline void open_exchange() {}
inline void send_to(int rank, float* target, float value, int) {
    cluster->shared[rank][target - shared_memory] = value;
}
inline void receive(int, int) { cluster_barrier(); }

#include "sweep.cu"

template <int BLOCKS, int WIDTH_OF_BLOCK, class Run>
void emulate(int blocks, int runs, int shared_floats, Run run) {
    for (int y = 0; y < runs; ++y)
        for (int first = 0; first < blocks; first += BLOCKS) {
            Cluster here;
            // Fresh shared memory holds anything: NaN shows what is read before it was written.
            here.shared.assign(BLOCKS, std::vector<float>(shared_floats, std::nanf("")));
            for (int rank = 0; rank < BLOCKS; ++rank)
                here.blocks.push_back(std::make_unique<std::barrier<>>(WIDTH_OF_BLOCK));
            here.all = std::make_unique<std::barrier<>>(BLOCKS * WIDTH_OF_BLOCK);
            std::vector<std::thread> threads;
            for (int rank = 0; rank < BLOCKS; ++rank)
                for (int t = 0; t < WIDTH_OF_BLOCK; ++t)
                    threads.emplace_back([&, rank, t] {
                        cluster = &here, shared_memory = here.shared[rank].data();
                        my_thread = t, my_rank = rank, my_x = first + rank, my_y = y;
                        run();
                    });
            for (auto& thread : threads) thread.join();
        }
}

extern "C" void sweep_ahead(const Arguments* a, int blocks, int runs) {
    emulate<CLUSTER, THREADS>(blocks, runs, shared_size<false>(), [&] { Ahead(*a).run_all(); });
}
extern "C" void sweep_back(const Arguments* a, int blocks, int runs) {
    emulate<CLUSTER, THREADS>(blocks, runs, shared_size<true>(), [&] { Behind(*a).run_all(); });
}
extern "C" void sum_products(const Products* p, int blocks, int runs) {
    emulate<1, PRODUCT_THREADS>(blocks, runs, PRODUCTS_SHARED, [&] { ProductTile(*p).run_all(); });
}
extern "C" int shared_bytes(int back) { return 4 * (back ? shared_size<true>() : shared_size<false>()); }
extern "C" int streamed_floats(int back) { return back ? streamed_size<true>() : streamed_size<false>(); }
extern "C" int arguments_bytes() { return sizeof(Arguments); }
extern "C" int products_bytes() { return sizeof(Products); }
extern "C" int products_shared_bytes() { return 4 * PRODUCTS_SHARED; }
