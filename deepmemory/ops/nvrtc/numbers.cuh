// Number types, and what a GPU has beyond C++: compiled for it as it stands here, replaced in tests (EMULATED).

struct alignas(16) Quad { float x, y, z, w; };
struct alignas(16) Words { unsigned x, y, z, w; };
struct BFloat16 { unsigned short bits; };
struct Half { unsigned short bits; };
constexpr unsigned POISON = 0xffffffffu;  // in an exchange through global memory: a word that has not come yet

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
typedef long long int64;

extern __shared__ float shared_memory[];
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
// With .ftz: six instructions fewer, which a step waits for; below 2^-126 a gate is shut.
DEVICE float power_of_two(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float coarse_tanh(float x) {  // 11 bits
#if __CUDA_ARCH__ >= 750
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return tanhf(x);
#endif
}
// The same number, of all lanes; the compiler does not make it again from arguments, whose memory a step would wait for.
DEVICE int kept(int x) { return __shfl_sync(0xffffffffu, x, 0); }
DEVICE unsigned in_lanes(bool flag) { return __ballot_sync(0xffffffffu, flag); }  // bit k is lane k's
DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// x or 0. In assembly, or what is asked of x alone, such as its sign, is asked right after the load of x, and waits for it.
DEVICE float only_if(bool flag, float x) {
    float y;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tselp.f32 %0, %1, 0f00000000, p;\n\t}"
        : "=f"(y) : "f"(x), "r"(unsigned(flag)));
    return y;
}
DEVICE float to_float(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
// In assembly, so that it stays where it stands: a shift is moved to the load that the number comes from, and waits for it.
DEVICE float to_float(BFloat16 x) {
    float y;
    asm("mov.b32 %0, {%1, %2};" : "=f"(y) : "h"((unsigned short)0), "h"(x.bits));
    return y;
}
DEVICE void round_to(Half& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
DEVICE void round_to(BFloat16& to, float x) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    const unsigned bits = bits_of(x);  // to the nearest, ties to even
    to.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}
DEVICE float round_to_tf32(float x) { unsigned y; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)); return float_of(y); }

// Two barriers, at the start of shared memory, count the bytes that other blocks' stores bring: nobody has to wait for
// a fence, which would also wait for every store to global memory.
DEVICE unsigned address_of(const void* shared) { return unsigned(__cvta_generic_to_shared(shared)); }
DEVICE unsigned in_block(unsigned address, int rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
DEVICE void open_exchange() {
    if (threadIdx.x < 2) {
        const unsigned barrier = address_of(shared_memory) + 8 * threadIdx.x;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(barrier));
    }
}
#define TRY_WAIT(SCOPE)                                                                                        \
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire." SCOPE ".shared::cta.b64 p, [%1], %2;\n\t" \
                 "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory")
template <bool FROM_OTHERS> DEVICE void wait_for_barrier(unsigned barrier, unsigned parity) {
    unsigned done;
    do {  // what other blocks have done is seen past the L1 cache, which is emptied for it
        if constexpr (FROM_OTHERS) TRY_WAIT("cluster");
        else TRY_WAIT("cta");
    } while (!done);
}
#undef TRY_WAIT
DEVICE void receive(int bytes, int exchange) {
    const unsigned barrier = address_of(shared_memory) + 8 * (exchange & 1), parity = exchange >> 1 & 1;
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    wait_for_barrier<true>(barrier, parity);
}
DEVICE float from_lane_across(float x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }
// Lanes hold neighbours in a row of a buffer: as many as fill 16 bytes put them together and share the receivers.
DEVICE unsigned of_lane(unsigned value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE Words gathered(float value, int first) {
    const unsigned word = bits_of(value);
    return {of_lane(word, first), of_lane(word, first + 1), of_lane(word, first + 2), of_lane(word, first + 3)};
}
template <class Input> DEVICE Words gathered(Input value, int first) {
    const unsigned half = value.bits, word = half | __shfl_down_sync(0xffffffffu, half, 1) << 16;
    return {of_lane(word, first), of_lane(word, first + 2), of_lane(word, first + 4), of_lane(word, first + 6)};
}
template <int RECEIVERS, class Input> DEVICE void send_to_all(Input* target, Input value, bool there, int exchange) {
    constexpr int together = 16 / int(sizeof(Input));
    const int place = threadIdx.x % together;
    const Words all = gathered(value, threadIdx.x % 32 - place);
    if (!there) return;
    const unsigned to = address_of(target - place), barrier = address_of(shared_memory) + 8 * (exchange & 1);
#pragma unroll
    for (int k = 0; k < RECEIVERS; k += together) {
        const int rank = k + place;
        if (RECEIVERS % together == 0 || rank < RECEIVERS)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                         ::"r"(in_block(to, rank)), "r"(all.x), "r"(all.y), "r"(all.z), "r"(all.w),
                         "r"(in_block(barrier, rank)) : "memory");
    }
}

// Blocks of a team exchange through global memory. What has not come yet is POISON in every word, which nobody sends: that
// very NaN is sent as another one. So data tell by themselves that they are there, and need no fence and no flag. Loads and
// stores are those of the whole GPU, past the L1 cache.
DEVICE Words without_poison(const Words& w) {
    return {min(w.x, POISON - 1), min(w.y, POISON - 1), min(w.z, POISON - 1), min(w.w, POISON - 1)};
}
DEVICE void store_for_team(Words* to, const Words& w) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}
DEVICE void load_if(bool wanted, Words& w, const Words* from) {  // without a branch: what is loaded in one is waited for
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                 "@p ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%5];\n\t}"
                 : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w) : "r"(unsigned(wanted)), "l"(from));
}
template <class Input> DEVICE void send_to_team(Input* target, Input value, bool there) {
    const int place = threadIdx.x % (16 / int(sizeof(Input)));
    const Words all = gathered(value, threadIdx.x % 32 - place);
    if (there && place == 0) store_for_team(reinterpret_cast<Words*>(target), without_poison(all));
}
DEVICE void gpu_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// A warp's copies from global to shared memory: an Arrival counts the bytes of one, and every further one flips its parity.
// A Hopper GPU has an engine for them; elsewhere the lanes copy, and nothing is on its way.
typedef unsigned long long Arrival;
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE void open_arrival(Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(address_of(arrival)));
#endif
}
DEVICE void written_for_fetching() {  // global memory that the engine will read
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
template <int QUADS> DEVICE void fetch_to_shared(Quad* to, const Quad* from, Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n\t"
                     "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];"
                     ::"r"(address_of(arrival)), "n"(QUADS * 16), "r"(address_of(to)), "l"(from) : "memory");
#else
    for (int k = threadIdx.x % 32; k < QUADS; k += 32) to[k] = from[k];
    __syncwarp();
#endif
}
DEVICE void wait_for(const Arrival* arrival, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    wait_for_barrier<false>(address_of(arrival), parity);
#endif
}
// Memory that this very block wrote, past the L1 cache, which has little room beside the shared memory.
DEVICE Quad from_l2(const Quad* at) {
    Quad q;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(q.x), "=f"(q.y), "=f"(q.z), "=f"(q.w) : "l"(at));
    return q;
}
DEVICE Quad from_ring(const Quad* at) {  // volatile, as waiting and fetching are: it stays between them
    Quad q;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(q.x), "=f"(q.y), "=f"(q.z), "=f"(q.w) : "r"(address_of(at)));
    return q;
}

// Words that follow one another at a multiple of their size, or zeros: one load and no branch, which would wait for the memory.
DEVICE void load_or_zero(bool there, unsigned short& to, const void* from) {
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\tmov.b16 %0, 0;\n\t@p ld.global.nc.b16 %0, [%2];\n\t}"
        : "=&h"(to) : "r"(unsigned(there)), "l"(from));
}
DEVICE void load_or_zero(bool there, unsigned (&to)[1], const void* from) {
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\tmov.b32 %0, 0;\n\t@p ld.global.nc.b32 %0, [%2];\n\t}"
        : "=&r"(to[0]) : "r"(unsigned(there)), "l"(from));
}
DEVICE void load_or_zero(bool there, unsigned (&to)[2], const void* from) {
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
        "@p ld.global.nc.v2.b32 {%0, %1}, [%3];\n\t}"
        : "=&r"(to[0]), "=&r"(to[1]) : "r"(unsigned(there)), "l"(from));
}
DEVICE void load_or_zero(bool there, unsigned (&to)[4], const void* from) {
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\t"
        "mov.b32 %3, 0;\n\t@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%5];\n\t}"
        : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3]) : "r"(unsigned(there)), "l"(from));
}

// sum[16 x 8] += a[16 x k] b[k x 8] for a warp, k = 16 of two bytes or 8 of four; where elements are is PTX's "fragments".
#define MMA(SHAPE, TYPE)                                                                                              \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                   \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1))
DEVICE void multiply_tile(float* sum, const Words& a, unsigned b0, unsigned b1, BFloat16) { MMA("m16n8k16", "bf16"); }
DEVICE void multiply_tile(float* sum, const Words& a, unsigned b0, unsigned b1, Half) { MMA("m16n8k16", "f16"); }
DEVICE void multiply_tile(float* sum, const Words& a, unsigned b0, unsigned b1, float) { MMA("m16n8k8", "tf32"); }
#undef MMA
#endif

DEVICE unsigned largest(unsigned a, unsigned b) { return a > b ? a : b; }
DEVICE unsigned largest(const Words& w) { return largest(largest(w.x, w.y), largest(w.z, w.w)); }  // POISON if one is
// Words that other blocks of a team send, zeros where is_sent(k) is false. Those that have not come are asked for again, all at
// once. With WARP lanes go on together.
template <int COUNT, bool WARP, class Sent, class Address> DEVICE void receive_words(Words* w, Sent is_sent, Address address) {
    unsigned newest[COUNT];  // tells what has to be asked for: less than that would make the loads wait for one another
#pragma unroll
    for (int k = 0; k < COUNT; ++k) w[k] = {0, 0, 0, 0}, newest[k] = is_sent(k) ? POISON : 0;
    bool missing;
    do {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) load_if(newest[k] == POISON, w[k], address(k));
        unsigned most = 0;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) newest[k] = largest(w[k]), most = largest(most, newest[k]);
        missing = most == POISON;
    } while (WARP ? in_lanes(missing) != 0 : missing);
}
DEVICE float to_float(float x) { return x; }
DEVICE void round_to(float& to, float x) { to = x; }

template <int KIND> struct NumberOf;
template <> struct NumberOf<0> { typedef float type; };
template <> struct NumberOf<1> { typedef BFloat16 type; };
template <> struct NumberOf<2> { typedef Half type; };
typedef NumberOf<VALUE>::type Value;    // of what goes in, comes out and is kept for the way back
typedef NumberOf<WEIGHT>::type Weight;  // of matrices and biases

// What products multiply: exact float32 numbers, what the tensor cores take of the values' type, or float32 numbers that are
// SPLIT for the tensor cores.
enum { FMA, MMA_TILES, SPLIT_TILES };
constexpr bool TENSOR_CORES = PRODUCT != FMA, SPLIT = PRODUCT == SPLIT_TILES;
template <bool> struct InputOf { typedef Value type; };
template <> struct InputOf<false> { typedef float type; };
typedef InputOf<TENSOR_CORES>::type Input;
DEVICE Input as_input(float x) {
    Input to;
    round_to(to, TENSOR_CORES && !SPLIT && VALUE == 0 ? round_to_tf32(x) : x);
    return to;
}
// A weight is rounded like the values, also where it is multiplied exactly.
DEVICE Input as_weight(float x) {
    if (TENSOR_CORES) return as_input(x);
    Value rounded;
    round_to(rounded, x);
    return as_input(to_float(rounded));
}
// The two numbers with 11 bits, of which the tensor cores take no more, that a float32 number is the sum of but for its last
// bits: the nearest one, and what is left, whose sign is anything.
DEVICE Words nearest(const Words& w) {
    constexpr unsigned half = 0x1000, bits = 0xffffe000u;
    return {(w.x + half) & bits, (w.y + half) & bits, (w.z + half) & bits, (w.w + half) & bits};
}
DEVICE unsigned rest(unsigned w, unsigned near) { return bits_of(float_of(w) - float_of(near)) & 0xffffe000u; }
DEVICE Words rest(const Words& w, const Words& near) {
    return {rest(w.x, near.x), rest(w.y, near.y), rest(w.z, near.z), rest(w.w, near.w)};
}
template <class T> DEVICE void put(T* to, float x) { round_to(*to, x); }
#ifndef EMULATED
__device__
#endif
    const Quad ZEROS = {0.f, 0.f, 0.f, 0.f};
DEVICE const Value* zero() { return reinterpret_cast<const Value*>(&ZEROS); }
#ifndef EMULATED
__device__
#endif
    const unsigned ONE = VALUE == 0 ? 0x3f800000u : VALUE == 1 ? 0x3f80u : 0x3c00u;
DEVICE const Value* one() { return reinterpret_cast<const Value*>(&ONE); }
DEVICE void take(float& to, const unsigned* words, int k) { to = float_of(words[k]); }
template <class T> DEVICE void take(T& to, const unsigned* words, int k) { to.bits = (unsigned short)(words[k / 2] >> k % 2 * 16); }
template <int COUNT, class T> DEVICE void load_or_zero(bool there, T* to, const T* from) {
    if constexpr (COUNT * sizeof(T) == 2) {
        load_or_zero(there, to->bits, from);
    } else {
        unsigned words[COUNT * sizeof(T) / 4];
        load_or_zero(there, words, from);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) take(to[k], words, k);
    }
}
DEVICE unsigned in_one_word(float first, float) { return bits_of(first); }
template <class T> DEVICE unsigned in_one_word(T first, T second) { return first.bits | unsigned(second.bits) << 16; }
