// What the host launches.

#if TEAM || DIRECT  // with as many registers as there are, or ptxas lets every product wait for its inputs one by one
#define LAYOUT __launch_bounds__(THREADS, 1)
#elif CLUSTER > 1
#define LAYOUT __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
#else
#define LAYOUT __launch_bounds__(THREADS)
#endif
extern "C" __global__ void LAYOUT sweep_forward(const __grid_constant__ Arguments a) { Forward(a).run_all(); }
#if SAVE  // nobody goes back where nothing was saved
extern "C" __global__ void LAYOUT sweep_backward(const __grid_constant__ Arguments a) { Backward(a).run_all(); }
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, PRODUCT_BLOCKS) sum_products(const __grid_constant__ Products p) {
    multiply_tiles(p);
}
#endif
