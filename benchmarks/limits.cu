// What limits a recurrent layer on a GPU, one kernel for each. Compiled after numbers.cuh of the nvrtc engine, whose
// exchange, copies and tensor-core products these are. `benchmarks/limits.py` adds the extern "C" names at the end.
//
// Every loop is bounded: who waits too long for a message counts an error, and does not wait again. All threads take part
// in all rounds, so that barriers are met even then. An error of 0 says that all messages came, with the right values.

typedef unsigned long long Count;

constexpr long long PATIENCE = 1 << 26;  // clock cycles, some 40 milliseconds
constexpr int CHAIN = 4;  // dependent multiplications of a layer

struct Waiting {
    bool lost = false;
    template <class Poll> DEVICE void until(Poll poll) {
        long long begin = 0;
        while (!lost && !poll()) {
            const long long now = clock64();
            if (!begin) begin = now;
            lost = now - begin > PATIENCE;
        }
    }
};
DEVICE bool has_arrived(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
DEVICE void report(Count* errors, unsigned found) {
    if (found) atomicAdd(errors, Count(found));
}

// What a layer does between its two exchanges, with numbers that are zero: dependent multiplications, partial sums through
// shared memory and a barrier, and the activation. `one` and `zero` come from the host, so that nothing is left out. A warp
// that has nothing to send may be a round late in reading `sums`, where it finds the same number.
template <bool GATE> DEVICE float work(float input, float* sums, int neighbour, float one, float zero) {
    float sum = input;
#pragma unroll
    for (int i = 0; i < CHAIN; ++i) sum = fmaf(sum, one, zero);
    sums[threadIdx.x] = sum;
    block_barrier();
    const float total = sums[neighbour];
    return (GATE ? reciprocal(one + power_of_two(total)) : fmaxf(total, 0.01f * total)) * zero;
}

extern "C" __global__ void nothing() {}

extern "C" __global__ void barriers(long long rounds) {
#pragma unroll 8
    for (int k = 0; k < int(rounds); ++k) block_barrier();
}

struct alignas(8) Numbered { float value; unsigned number; };

// A layer of a step in a single block: values of another warp in, values out, two barriers.
template <bool GATE> DEVICE void layers_in_a_block(int rounds, float one, float zero, Count* errors) {
    Numbered* const buffer = reinterpret_cast<Numbered*>(shared_memory);
    float* const sums = reinterpret_cast<float*>(buffer + blockDim.x);
    const int neighbour = (threadIdx.x + 32) % blockDim.x;
    unsigned wrong = 0;
    buffer[threadIdx.x] = {zero, 0};
    block_barrier();
    for (int k = 0; k < rounds; ++k) {
        const Numbered input = buffer[neighbour];
        wrong += input.number != unsigned(k);
        const float output = work<GATE>(input.value, sums, neighbour, one, zero);
        buffer[threadIdx.x] = {output, input.number + 1};
        block_barrier();
    }
    report(errors, wrong);
}
extern "C" __global__ void layers_in_a_block_hidden(long long rounds, float one, float zero, Count* errors) {
    layers_in_a_block<false>(int(rounds), one, zero, errors);
}
extern "C" __global__ void layers_in_a_block_gate(long long rounds, float one, float zero, Count* errors) {
    layers_in_a_block<true>(int(rounds), one, zero, errors);
}

// All multiprocessors at once: each block stores 16 bytes and polls those of all others. A block stores again after it has
// all of a round, so that two buffers suffice. `slots` is zero at first; slots of a round are `apart` quads apart.
extern "C" __global__ void exchanges_of_all(long long rounds, uint4* slots, long long apart, Count* errors) {
    Waiting waiting;
    unsigned number = 1;
    for (int k = 0; k < int(rounds); ++k) {
        uint4* const buffer = slots + (k & 1) * gridDim.x * apart;
        if (threadIdx.x == 0)
            asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};"
                         ::"l"(buffer + blockIdx.x * apart), "r"(number) : "memory");
        if (threadIdx.x < gridDim.x)
            waiting.until([&] {
                uint4 q;
                asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(buffer + threadIdx.x * apart) : "memory");
                return q.x == number && q.y == number && q.z == number && q.w == number;
            });
        ++number;
        block_barrier();
    }
    report(errors, waiting.lost);
}

// Loads of which each needs the one before: `at` leads from pointer to pointer.
extern "C" __global__ void dependent_loads(long long rounds, void** at, void** end, Count* errors) {
    for (int k = 0; k < int(rounds); ++k) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at));
    report(errors, at != end);
}

// Products at full rate: eight sums for each thread, or eight tiles of sums for each warp.
constexpr int AT_ONCE = 8;
extern "C" __global__ void multiply_fma(long long rounds, float one, float zero, Count* errors) {
    float sums[AT_ONCE];
    unsigned wrong = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sums[i] = zero * i;  // or the compiler would see that all are the same
#pragma unroll 4
    for (int k = 0; k < int(rounds); ++k)
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sums[i] = fmaf(sums[i], one, one);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) wrong += sums[i] != float(rounds);
    report(errors, wrong);
}
// `ones` is one 1, or two of 16 bits, in the type's bits.
template <class Number> DEVICE void multiply_tiles(int rounds, unsigned ones, float zero, Count* errors) {
    constexpr int inputs = 32 / int(sizeof(Number));
    float sums[AT_ONCE][4];
    unsigned wrong = 0;
    const Words weights = {ones, ones, ones, ones};
#pragma unroll
    for (int i = 0; i < 4 * AT_ONCE; ++i) sums[i / 4][i % 4] = zero * i;
#pragma unroll 2
    for (int k = 0; k < rounds; ++k)
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) multiply_tile(sums[i], weights, ones, ones, Number());
#pragma unroll
    for (int i = 0; i < 4 * AT_ONCE; ++i) wrong += sums[i / 4][i % 4] != float(inputs) * rounds;
    report(errors, wrong);
}
#if __CUDA_ARCH__ >= 800
extern "C" __global__ void multiply_tf32(long long rounds, float one, float zero, Count* errors) {
    multiply_tiles<float>(int(rounds), bits_of(one), zero, errors);
}
extern "C" __global__ void multiply_bfloat16(long long rounds, float one, float zero, Count* errors) {
    multiply_tiles<BFloat16>(int(rounds), bits_of(one) | bits_of(one) >> 16, zero, errors);
}
#endif

#if __CUDA_ARCH__ >= 900
// Messages between the blocks of a cluster are counters, in all bits that a number has.
DEVICE float message(unsigned number, float) { return float_of(number); }
DEVICE BFloat16 message(unsigned number, BFloat16) { return {static_cast<unsigned short>(number)}; }
DEVICE unsigned word_of(unsigned number, float) { return number; }
DEVICE unsigned word_of(unsigned number, BFloat16) { return (number & 0xffff) * 0x10001; }

// Round after round every block sends `elements` numbers to every block, and waits for those of all: an exchange alone, or
// with a layer's work before it.
template <int BLOCKS, class Number, bool WORK>
DEVICE void exchanges(int rounds, int elements, float one, float zero, Count* errors) {
    constexpr int together = 16 / int(sizeof(Number));
    const int rank = blockIdx.x % BLOCKS, quads = BLOCKS * elements / together;
    float* const sums = shared_memory + 4;  // after two barriers
    Words* const buffers = reinterpret_cast<Words*>(sums + blockDim.x);
    const int first = threadIdx.x % quads, neighbour = (threadIdx.x + 32) % blockDim.x;
    Waiting waiting;
    unsigned wrong = 0, number = 1 + bits_of(zero);
    open_exchange();
    cluster_barrier();
    for (int k = 0; k < rounds; ++k) {
        Words* const buffer = buffers + (k & 1) * quads;
        Number* const target = reinterpret_cast<Number*>(buffer) + rank * elements;
        for (int begin = 0; begin < elements; begin += blockDim.x) {
            const int i = begin + threadIdx.x;
            send_to_all<BLOCKS>(target + i, message(number, Number()), i < elements, k);
        }
        const unsigned barrier = address_of(shared_memory) + 8 * (k & 1), parity = k >> 1 & 1;
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(16 * quads) : "memory");
        waiting.until([&] { return has_arrived(barrier, parity); });
        const unsigned expected = word_of(k + 1, Number());
        for (int i = threadIdx.x; i < quads; i += blockDim.x) {
            const Words q = buffer[i];
            wrong += q.x != expected || q.y != expected || q.z != expected || q.w != expected;
        }
        const unsigned received = buffer[first].x & 0xffff;  // what is sent next depends on it
        number = k + 2 + (received - ((k + 1) & 0xffff));
        if (WORK) number += bits_of(work<false>(float_of(received) * zero, sums, neighbour, one, zero));
        else block_barrier();
    }
    report(errors, wrong + waiting.lost);
    warp_barrier();
    cluster_barrier();  // nobody ends while others may still send to it
}
#define EXCHANGES(NAME, BLOCKS, NUMBER, WORK)                                                                       \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(512, 1)                             \
    NAME(long long rounds, long long elements, float one, float zero, Count* errors) {                              \
        exchanges<BLOCKS, NUMBER, WORK>(int(rounds), int(elements), one, zero, errors);                             \
    }
#define NOTHING(NAME, BLOCKS) extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) NAME() {}

// Weights that are read again and again: block b copies slice b % slices of `from` to its shared memory, pass after pass,
// each warp with two slots on their way. Words count up from 0.
constexpr int SLOT_QUADS = 256, SLOTS = 2;
extern "C" __global__ void __launch_bounds__(512, 1)
    copies(long long passes, const Quad* from, long long slices, long long quads, Count* errors) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    Arrival* const arrivals = reinterpret_cast<Arrival*>(shared_memory) + warp * SLOTS;
    Quad* const ring = reinterpret_cast<Quad*>(shared_memory) + warps * SLOTS / 2 + warp * SLOTS * SLOT_QUADS;
    const long long start = blockIdx.x % slices * quads;
    const int of_pass = int(quads / (warps * SLOT_QUADS)), all = of_pass * int(passes);
    const auto place = [&](int n) { return start + (n % of_pass * warps + warp) * SLOT_QUADS; };
    Waiting waiting;
    unsigned wrong = 0;
    for (int slot = 0; slot < SLOTS; ++slot) open_arrival(arrivals + slot);
    block_barrier();
    for (int n = 0; n < SLOTS && n < all; ++n)
        fetch_to_shared<SLOT_QUADS>(ring + n * SLOT_QUADS, from + place(n), arrivals + n);
    for (int n = 0; n < all; ++n) {
        const int slot = n % SLOTS;
        waiting.until([&] { return has_arrived(address_of(arrivals + slot), n / SLOTS & 1); });
        const int quad = lane * (SLOT_QUADS / 32);
        wrong += bits_of(from_ring(ring + slot * SLOT_QUADS + quad).x) != unsigned(4 * (place(n) + quad));
        warp_barrier();
        if (n + SLOTS < all)
            fetch_to_shared<SLOT_QUADS>(ring + slot * SLOT_QUADS, from + place(n + SLOTS), arrivals + slot);
    }
    report(errors, wrong + waiting.lost);
}
#endif
