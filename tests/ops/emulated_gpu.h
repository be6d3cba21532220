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
// Copies a value to the same place in the shared memory of every block of the cluster.
void store_in_all_blocks(void* target, const void* value, int size);
void emulate(int cluster_size, int width_of_block, int blocks, int runs, int shared_floats, void (*kernel)(const void*),
             const void* arguments);
