// A GPU as emulate.cpp sees it. Kept apart from the scheduler because it is compiled for every set of constants.
#include <cstring>

struct Thread {
    int index, x, y;
    float* shared;
    unsigned (*a)[4], (*b)[2];  // of the lanes of its warp
};
extern Thread* self;

void warp_barrier();
void block_barrier();
void cluster_barrier();
unsigned in_lanes(bool flag);
// Copies that are made when somebody waits for their arrival; until then NaN is in their place.
typedef unsigned long long Arrival;
void start_copy(void* to, const void* from, int size, Arrival* arrival);
void wait_for(Arrival* arrival, unsigned parity);
// Stores to global memory that other blocks see later, in any order, word by word; half of those of POISON not before a
// fence of the thread that stored it.
void store_in_global(unsigned* to, unsigned word);
void gpu_fence();
void let_others_run();
void pause_at_times();  // for longer than others need for the next exchange
void must_begin_at_a_multiple(const void* memory, int bytes);  // as what one load brings does
// Copies a value to the same place in the shared memory of every block of the cluster.
void store_in_all_blocks(void* target, const void* value, int size);
void emulate(int cluster_size, int width_of_block, int blocks, int runs, int shared_floats, void (*kernel)(const void*),
             const void* arguments);
