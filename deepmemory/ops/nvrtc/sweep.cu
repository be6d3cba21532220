// The two sweeps over time for one layer in one direction, float32, compiled at run time for one shape.
//
// A cluster of CLUSTER blocks takes ROWS sequences of one run through all time steps. Of every linear layer each
// block owns a slice of the output features, keeps the weights of that slice on the chip, and sends what it computed
// to the shared memory of the other blocks. One layer of one step is
//
//     partial sums -> block barrier -> add up, apply the gate, store, send -> receive
//
// where a warp multiplies a slice of the inputs with up to 128 outputs, and a thread finishes single elements.
// Batch size, length and direction are arguments. Constants of the compiled kernel:
//
//   CELL          0 dmu, 1 rhn, 2 rnn, 3 gru, 4 lstm
//   ACTIVATION    0 leaky_relu, 1 relu, 2 tanh, 3 silu, 4 gelu: of a dmu's hidden layers or an rnn's state
//   D             features of the state
//   LAYERS        linear layers of a step
//   WIDTHS        output features of each of them, not counting gates: the hidden widths, then D
//   ROWS, CLUSTER, WARPS, SAVE
//   KEPT_AHEAD, SHARED_AHEAD, KEPT_BACK, SHARED_BACK   for each layer, how many of the quads of inputs that a warp
//                 multiplies have their weights in registers, and how many in shared memory; those of the rest are
//                 read from global memory at every step

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
typedef long long int64;

extern __shared__ float shared_memory[];
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE float power_of_two(float x) { float y; asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

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
DEVICE void send_to(int rank, float* target, float value, int exchange) {
    const unsigned barrier = in_block(address_of(shared_memory) + 8 * (exchange & 1), rank);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     in_block(address_of(target), rank)),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}
DEVICE void receive(int bytes, int exchange) {
    const unsigned barrier = address_of(shared_memory) + 8 * (exchange & 1), parity = exchange >> 1 & 1;
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    unsigned done;
    do {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
#endif

enum { DMU, RHN, RNN, GRU, LSTM };
enum { LEAKY_RELU, RELU, TANH, SILU, GELU };

constexpr int THREADS = WARPS * 32;
constexpr int WIDTH[] = {WIDTHS};
constexpr int KEPT[2][LAYERS] = {{KEPT_AHEAD}, {KEPT_BACK}};
constexpr int SHARED[2][LAYERS] = {{SHARED_AHEAD}, {SHARED_BACK}};

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int inputs(int l) { return l == 0 ? D : WIDTH[l - 1]; }
constexpr int features(int l) { return WIDTH[l]; }
constexpr int gates(int l) {
    return CELL == DMU ? (l == LAYERS - 1 ? 2 : 1) : CELL == RHN ? 2 : CELL == RNN ? 1 : CELL == GRU ? 3 : 4;
}
constexpr int slice(int f) { return ceil_div(f, CLUSTER); }                   // features that a block owns
constexpr int elements(int f) { return ceil_div(ROWS * slice(f), THREADS); }  // that a thread finishes
constexpr int elements_before(int l) { return l <= 0 ? 0 : elements_before(l - 1) + elements(WIDTH[l - 1]); }
constexpr int OWN = elements(D);

// Places in a step of the trace and of the deltas; hoisted.py gives their order.
constexpr bool SLOPES = CELL == DMU && (ACTIVATION == SILU || ACTIVATION == GELU);
constexpr int widths_before(int l) { return l == 0 ? 0 : widths_before(l - 1) + WIDTH[l - 1]; }
constexpr int HIDDEN = CELL == DMU ? widths_before(LAYERS - 1) : 0;
constexpr int AFTER_HIDDEN = SLOPES ? 2 * HIDDEN : HIDDEN;
constexpr int TRACE = CELL == DMU ? AFTER_HIDDEN + 2 * D
                    : CELL == RHN ? 2 * D * LAYERS + D * (LAYERS - 1)
                    : CELL == GRU ? 4 * D : CELL == LSTM ? 5 * D : 0;
constexpr int outputs_before(int l) { return l == 0 ? 0 : outputs_before(l - 1) + gates(l - 1) * features(l - 1); }
constexpr int DELTAS = outputs_before(LAYERS) + (CELL == GRU ? D : 0);

struct Arguments {              // every field has 8 bytes: the host sends a row of int64
    const float* weight[LAYERS];  // [R, gates * features, inputs]
    const float* bias[LAYERS];    // [R, gates * features] or null
    float* streamed;              // [R, CLUSTER, streamed_size] for weights that find no room on the chip
    const float* projected;       // [R, T, B, gates * features] of layer 0
    const float* h0;              // [R, B, D]
    const float* c0;
    const int64* lengths;         // [R, B] or null
    float* y;                     // [R, T, B, D]
    float* h_n;                   // [R, B, D]; going back the gradient of h_n comes in here, or null
    float* c_n;
    float* trace;                 // [R, T, B, TRACE]
    float* deltas;                // [R, T, B, DELTAS]
    float* grad_h0;               // or null where nobody asks
    float* grad_c0;
    const float* grad_y;          // [R, T, B, D] with the strides below, or null
    int64 grad_y_run, grad_y_step, grad_y_row, grad_y_feature;
    int64 steps;
    int64 batch;
    int64 reverse;
};

// --- Products of a weight slice with the rows' inputs -----------------------------------------------------------

// What the lanes of a warp multiply: `row_groups` groups of them share the rows, and a lane has `outputs` outputs.
// Reading from shared memory is what limits a product, so a lane should have outputs and rows in like numbers, as long
// as padding stays under a third. Groups hold the same weights, and fewer of them in registers: they have to save a
// quarter of the reads.
struct LaneTile { int row_groups, outputs; };
constexpr LaneTile lane_tile(int outputs) {
    LaneTile best{1, 1};
    int fewest = 1 << 30;
    for (int groups = 1; groups <= 4; groups *= 2) {
        const int enough = groups == 1 ? fewest : fewest * 3 / 4;
        for (int n = 1; n <= 4 && ROWS % groups == 0; ++n) {
            const int warps = ceil_div(outputs, 32 / groups * n), padded = warps * (32 / groups) * n;
            const int reads = warps * (n + ROWS / groups);
            if (padded * 3 < 4 * (ceil_div(outputs, 32) * 32) && reads <= enough && reads < fewest)
                fewest = reads, best = {groups, n};
        }
    }
    return best;
}

template <int INPUTS, int OUTPUTS>  // all inputs, the outputs of this block
struct Spread {
    static constexpr int per_lane = lane_tile(OUTPUTS).outputs;
    static constexpr int lanes = 32 / lane_tile(OUTPUTS).row_groups;  // side by side over outputs
    static constexpr int rows = ROWS / lane_tile(OUTPUTS).row_groups;  // of a lane
    static constexpr int quads = ceil_div(INPUTS, 4);
    static constexpr int groups = ceil_div(OUTPUTS, lanes * per_lane);
    static constexpr int quads_per_item = ceil_div(quads, larger(1, smaller(WARPS / groups, quads)));
    static constexpr int slices = ceil_div(quads, quads_per_item);  // of the inputs, no more than have something to do
    static constexpr int items = groups * slices;
    static constexpr int items_per_warp = ceil_div(items, WARPS);
    static constexpr int padded_inputs = slices * quads_per_item * 4;
    static constexpr int padded_outputs = groups * per_lane * lanes;
    static constexpr int sums = slices * ROWS * padded_outputs;
};

template <int L, bool BACK> struct Shape;
template <int L> struct Shape<L, false> {  // from a layer's inputs to its outputs
    static constexpr int in = inputs(L), own = slice(features(L)), out = gates(L) * own;
    using S = Spread<in, out>;
};
template <int L> struct Shape<L, true> {  // from the deltas of a layer's outputs to its inputs
    static constexpr int in = gates(L) * features(L), own = slice(inputs(L)), out = own;
    using S = Spread<in, out>;
};

template <bool BACK, int L = 0> constexpr int row_stride() {
    if constexpr (L == LAYERS) return 0;
    else return larger(Shape<L, BACK>::S::padded_inputs, row_stride<BACK, L + 1>());
}
template <bool BACK, int L = 0> constexpr int sums_size() {
    if constexpr (L == LAYERS) return 0;
    else return larger(Shape<L, BACK>::S::sums, sums_size<BACK, L + 1>());
}
template <bool BACK, int L = 0> constexpr int weights_in_shared() {
    if constexpr (L == LAYERS) return 0;
    else {
        using S = typename Shape<L, BACK>::S;
        return S::slices * SHARED[BACK][L] * S::padded_outputs * 4 + weights_in_shared<BACK, L + 1>();
    }
}
template <bool BACK, int L = 0> constexpr int streamed_size() {  // floats of a block
    if constexpr (L == LAYERS) return 0;
    else {
        using S = typename Shape<L, BACK>::S;
        const int quads = S::quads_per_item - KEPT[BACK][L] - SHARED[BACK][L];
        return S::slices * quads * S::padded_outputs * 4 + streamed_size<BACK, L + 1>();
    }
}
// Shared memory, in floats: barriers, two buffers of rows, partial sums, lengths of the rows, weights.
constexpr int BARRIERS = 4;
template <bool BACK> constexpr int shared_size() {
    return BARRIERS + 2 * ROWS * row_stride<BACK>() + sums_size<BACK>() + ceil_div(ROWS, 4) * 4 + weights_in_shared<BACK>();
}

struct alignas(16) Quad { float x, y, z, w; };

template <int L, bool BACK> struct Panel {
    using H = Shape<L, BACK>;
    using S = typename H::S;
    static constexpr int kept_quads = KEPT[BACK][L], shared_quads = SHARED[BACK][L];
    static constexpr int streamed_quads = S::quads_per_item - kept_quads - shared_quads;
    static constexpr int J = S::per_lane;
    Quad kept[larger(1, S::items_per_warp * kept_quads * J)];
    float bias[S::items_per_warp * J];
    const Quad* shared;    // [slices, shared_quads, padded_outputs]
    const Quad* streamed;  // [slices, streamed_quads, padded_outputs], in global memory

    // Where the weight from input k to the block's output n comes from, or null where there is none.
    DEVICE static const float* place(const float* weight, int rank, int k, int n) {
        const int feature = rank * H::own + n % H::own;
        if (k >= H::in || n >= H::out || feature >= (BACK ? inputs(L) : features(L))) return nullptr;
        if constexpr (BACK) return weight + int64(k) * inputs(L) + feature;
        else return weight + int64(n / H::own * features(L) + feature) * H::in + k;
    }
    DEVICE static Quad quad(const float* weight, int rank, int q, int n) {
        if constexpr (!BACK && H::in % 4 == 0) {  // four neighbours
            const float* all = place(weight, rank, 4 * q, n);
            if (all && reinterpret_cast<int64>(all) % 16 == 0) return *reinterpret_cast<const Quad*>(all);
        }
        const float *x = place(weight, rank, 4 * q, n), *y = place(weight, rank, 4 * q + 1, n);
        const float *z = place(weight, rank, 4 * q + 2, n), *w = place(weight, rank, 4 * q + 3, n);
        return {x ? *x : 0.f, y ? *y : 0.f, z ? *z : 0.f, w ? *w : 0.f};
    }
    // Puts COUNT quads of each slice, from FIRST on, in the order in which warps read them.
    template <int FIRST, int COUNT> DEVICE static const Quad* put(const float* weight, int rank, float*& memory) {
        constexpr int size = S::slices * COUNT * S::padded_outputs;
        Quad* to = reinterpret_cast<Quad*>(memory);
        for (int i = thread_index(); i < size; i += THREADS) {
            const int q = i / S::padded_outputs, from = q / larger(1, COUNT);
            to[i] = quad(weight, rank, from * S::quads_per_item + FIRST + q % larger(1, COUNT), i % S::padded_outputs);
        }
        memory += 4 * size;
        return to;
    }

    // Brings the weights to where they stay; `pool` is what is left of the shared memory, `far` of the global one.
    // Blocks of one rank write the same to the same place there.
    DEVICE void load(const float* weight, const float* biases, float*& pool, float*& far, int rank) {
        const int lane = thread_index() % S::lanes, warp = thread_index() / 32;
        shared = put<kept_quads, shared_quads>(weight, rank, pool);
        streamed = put<kept_quads + shared_quads, streamed_quads>(weight, rank, far);
#pragma unroll
        for (int i = 0; i < S::items_per_warp; ++i) {
            const int item = warp + i * WARPS, from = item / S::groups;
#pragma unroll
            for (int j = 0; j < J; ++j) {
                const int n = (item % S::groups * J + j) * S::lanes + lane;
#pragma unroll
                for (int q = 0; q < kept_quads; ++q)
                    kept[(i * kept_quads + q) * J + j] =
                        item < S::items ? quad(weight, rank, from * S::quads_per_item + q, n) : Quad{0.f, 0.f, 0.f, 0.f};
                bias[i * J + j] = 0.f;
                if (!BACK && biases && from == 0 && n < H::out) {
                    const int feature = rank * H::own + n % H::own;
                    if (feature < features(L)) bias[i * J + j] = biases[n / H::own * features(L) + feature];
                }
            }
        }
    }

    // sums[slice, row, output] of rows[row, input].
    DEVICE void multiply(const float* rows, float* sums) const {
        constexpr int stride = row_stride<BACK>();
        constexpr int K = S::rows;
        constexpr int chains = K * J >= 4 ? 1 : 4 / (K * J);  // of additions that do not wait for one another
        const int lane = thread_index() % S::lanes, warp = thread_index() / 32;
        const int row = thread_index() % 32 / S::lanes * K;  // the first of this lane
#pragma unroll
        for (int i = 0; i < S::items_per_warp; ++i) {
            const int item = warp + i * WARPS, n = item % S::groups * J * S::lanes + lane, from = item / S::groups;
            if (item >= S::items) break;
            float sum[K * J * chains];
#pragma unroll
            for (int k = 0; k < K * J * chains; ++k) sum[k] = k % chains ? 0.f : bias[i * J + k / chains % J];
            const Quad* in = reinterpret_cast<const Quad*>(rows + row * stride) + from * S::quads_per_item;
            auto add = [&](const Quad (&w)[J], int q) {
#pragma unroll
                for (int r = 0; r < K; ++r) {
                    const Quad a = in[r * (stride / 4) + q];
#pragma unroll
                    for (int j = 0; j < J; ++j) {
                        float* to = sum + (r * J + j) * chains;
                        to[0] += w[j].x * a.x;
                        to[1 % chains] += w[j].y * a.y;
                        to[2 % chains] += w[j].z * a.z;
                        to[3 % chains] += w[j].w * a.w;
                    }
                }
            };
            Quad w[J];
#pragma unroll
            for (int q = 0; q < kept_quads; ++q) {
#pragma unroll
                for (int j = 0; j < J; ++j) w[j] = kept[(i * kept_quads + q) * J + j];
                add(w, q);
            }
#pragma unroll 4
            for (int q = 0; q < shared_quads; ++q) {
#pragma unroll
                for (int j = 0; j < J; ++j)
                    w[j] = shared[(from * shared_quads + q) * S::padded_outputs + n + j * S::lanes];
                add(w, kept_quads + q);
            }
#pragma unroll 4
            for (int q = 0; q < streamed_quads; ++q) {
#pragma unroll
                for (int j = 0; j < J; ++j)
                    w[j] = streamed[(from * streamed_quads + q) * S::padded_outputs + n + j * S::lanes];
                add(w, kept_quads + shared_quads + q);
            }
#pragma unroll
            for (int k = 0; k < K * J; ++k) {
                float all = sum[k * chains];
#pragma unroll
                for (int c = 1; c < chains; ++c) all += sum[k * chains + c];
                sums[(from * ROWS + row + k / J) * S::padded_outputs + n + k % J * S::lanes] = all;
            }
        }
    }

    // Of COUNT slices from FIRST on, in pairs: a step waits for this chain of additions.
    template <int FIRST = 0, int COUNT = S::slices> DEVICE static float total(const float* sums, int row, int n) {
        if constexpr (COUNT == 1) return sums[(FIRST * ROWS + row) * S::padded_outputs + n];
        else return total<FIRST, COUNT / 2>(sums, row, n) + total<FIRST + COUNT / 2, COUNT - COUNT / 2>(sums, row, n);
    }
};

template <bool BACK, int L = 0> struct Panels {
    Panel<L, BACK> panel;
    Panels<BACK, L + 1> deeper;
    DEVICE void load(const Arguments& a, int run, float* pool, float* far, int rank) {
        const int64 outputs = gates(L) * features(L);
        const int64 weights = outputs * inputs(L);
        const float* bias = a.bias[L] ? a.bias[L] + run * outputs : nullptr;
        panel.load(a.weight[L] + run * weights, bias, pool, far, rank);
        deeper.load(a, run, pool, far, rank);
    }
    template <int WANTED> DEVICE auto& get() {
        if constexpr (WANTED == L) return panel;
        else return deeper.template get<WANTED>();
    }
};
template <bool BACK> struct Panels<BACK, LAYERS> {
    DEVICE void load(const Arguments&, int, float*, float*, int) {}
};

// --- Elementwise functions ------------------------------------------------------------------------------------------

// Short chains of instructions: a step waits for them. Each is good to a few units in the last place.
DEVICE float exp_of_negative(float x) {  // exp(-|x|)
    const float scale = -1.44269504f * fabsf(x);
    const float rest = fmaf(-1.44269504f, fabsf(x), -scale) - 1.92596303e-8f * fabsf(x);
    const float power = power_of_two(scale);
    return fmaf(power, 0.69314718f * rest, power);
}
struct Gate { float open, shut; };  // sigmoid(z) and 1 - sigmoid(z), each accurate where it is small
DEVICE Gate gate(float z) {
    const float e = exp_of_negative(z), big = reciprocal(1.f + e), small = e * big;
    return z >= 0.f ? Gate{big, small} : Gate{small, big};
}
DEVICE float tanh_of(float x) {
    const float e = exp_of_negative(2.f * x), large = copysignf((1.f - e) * reciprocal(1.f + e), x);
    const float q = x * x;  // below 0.35 the series, where the other way would lose digits
    float tail = -0.0088632355f;
    tail = fmaf(tail, q, 0.021869488f);
    tail = fmaf(tail, q, -0.053968254f);
    tail = fmaf(tail, q, 0.13333334f);
    tail = fmaf(tail, q, -0.33333334f);
    return fabsf(x) < 0.35f ? fmaf(x * q, tail, x) : x != x ? x : large;
}
DEVICE float sigmoid(float z) { return gate(z).open; }

DEVICE float activate(float a) {
    if (ACTIVATION == LEAKY_RELU) return a > 0.f ? a : 0.01f * a;
    if (ACTIVATION == RELU) return a > 0.f ? a : (a != a ? a : 0.f);
    if (ACTIVATION == TANH) return tanh_of(a);
    if (ACTIVATION == SILU) return a * sigmoid(a);
    return 0.5f * a * (1.f + erff(a * 0.70710678f));
}
DEVICE float slope_at(float a) {  // of silu and gelu, from what goes in
    const Gate g = gate(a);
    if (ACTIVATION == SILU) return g.open * (1.f + a * g.shut);
    return 0.5f * (1.f + erff(a * 0.70710678f)) + a * 0.39894228f * expf(-0.5f * a * a);
}
DEVICE float slope_from(float saved) {  // from what came out, or the saved slope itself
    if (ACTIVATION == LEAKY_RELU) return saved > 0.f ? 1.f : 0.01f;
    if (ACTIVATION == RELU) return saved <= 0.f ? 0.f : 1.f;  // 1 for NaN, as torch's
    if (ACTIVATION == TANH) return 1.f - saved * saved;
    return saved;
}

// --- What both sweeps know about their place ------------------------------------------------------------------------

template <bool BACK> struct Sweep {
    const Arguments& a;
    const int rank, run, steps, batch;
    const int first;  // sequence
    const int rows;   // that are sequences of the batch
    float* sums;
    int* until;  // [ROWS] steps that are real
    int begin, end;  // of what is not padding in every row; memory outside comes in as zero
    Panels<BACK> panels;
    int exchange = 0;  // counts what was sent and received; its parity tells the buffer

    DEVICE Sweep(const Arguments& a) : a(a), rank(block_x() % CLUSTER), run(block_y()), steps(int(a.steps)),
                                       batch(int(a.batch)), first(block_x() / CLUSTER * ROWS),
                                       rows(smaller(batch - first, ROWS)) {
        constexpr int size = ROWS * row_stride<BACK>();
        sums = shared_memory + BARRIERS + 2 * size;
        until = reinterpret_cast<int*>(sums + sums_size<BACK>());
        for (int i = thread_index(); i < 2 * size; i += THREADS) shared_memory[BARRIERS + i] = 0.f;
        for (int row = thread_index(); row < ROWS; row += THREADS)
            until[row] = !in_batch(row) ? 0 : a.lengths ? int(a.lengths[sequence(row)]) : steps;
        float* far = a.streamed + (int64(run) * CLUSTER + rank) * streamed_size<BACK>();
        panels.load(a, run, reinterpret_cast<float*>(until + ceil_div(ROWS, 4) * 4), far, rank);
        if (CLUSTER == 1) {
            block_barrier();
        } else {
            open_exchange();
            cluster_barrier();
        }
        int longest = 0;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) longest = larger(longest, until[row]);
        begin = a.reverse ? steps - longest : 0;
        end = a.reverse ? steps : longest;
    }
    DEVICE float* buffer(int which) const {
        return shared_memory + BARRIERS + (which & 1) * (ROWS * row_stride<BACK>());
    }
    DEVICE bool in_batch(int row) const { return row < rows; }
    DEVICE int64 sequence(int row) const { return int64(run) * batch + first + row; }
    // Where an element of a step is in [R, T, B, WIDTH]. A step waits for address arithmetic too: rows (r, t, b) are
    // counted in 32 bits, which the host makes sure of, and one wide multiplication makes elements of them.
    template <int WIDTH> DEVICE int64 at(int t, int row, int feature) const {
        const unsigned plane = (unsigned(run) * steps + t) * batch + first;
        return int64(plane) * WIDTH + (row * WIDTH + feature);
    }
    DEVICE int time(int s) const { return a.reverse ? steps - 1 - s : s; }

    // Calls visit(e, row, feature) for each element of `F` features that this thread finishes.
    template <int F, class Visit> DEVICE void for_own(Visit visit) const {
        constexpr int own = slice(F);
#pragma unroll
        for (int e = 0; e < elements(F); ++e) {
            const int i = thread_index() + e * THREADS, row = i / own, feature = rank * own + i % own;
            if (i < ROWS * own && feature < F) visit(e, row, feature);
        }
    }
    // Gives one input of the next product to every block of the cluster.
    DEVICE void send(int row, int input, float value) const {
        float* target = buffer(exchange) + row * row_stride<BACK>() + input;
        if (CLUSTER == 1) {
            *target = value;
        } else {
#pragma unroll
            for (int other = 0; other < CLUSTER; ++other) send_to(other, target, value, exchange);
        }
    }
    // Waits for all inputs of the next product. A block sends again only after it has received, so that a buffer that
    // is written to has been read by everybody: two of them suffice.
    template <int INPUTS> DEVICE void all_sent() {
        if (CLUSTER == 1) block_barrier();
        else receive(ROWS * INPUTS * int(sizeof(float)), exchange);
        ++exchange;
    }
    template <int L> DEVICE void multiply() {
        panels.template get<L>().multiply(buffer(exchange - 1), sums);
        block_barrier();
    }
    template <int L> DEVICE float total(int row, int n) const {
        return Panel<L, BACK>::total(sums, row, n);
    }
};

// --- Forward ----------------------------------------------------------------------------------------------------

struct Ahead : Sweep<false> {
    float h[OWN], c[CELL == LSTM ? OWN : 1];
    float x[elements(features(0)) * gates(0)];  // of the step to come, fetched one step early
    static constexpr int TRACED = CELL == DMU || CELL == RHN ? 2 : CELL == GRU ? 4 : CELL == LSTM ? 5 : 0;

    DEVICE Ahead(const Arguments& a) : Sweep(a) {}

    // Beyond the last step or the batch, anything that is there will do.
    DEVICE void fetch(int s, int e, int any_row, int feature) {
        const int t = time(smaller(s, steps - 1)), row = smaller(any_row, rows - 1);
        const float* from = a.projected + at<gates(0) * features(0)>(t, row, feature);
#pragma unroll
        for (int g = 0; g < gates(0); ++g) x[e * gates(0) + g] = from[g * features(0)];
    }

    template <int L> DEVICE void layer(int s, int t) {
        constexpr int F = features(L), G = gates(L), own = slice(F);
        constexpr bool hidden = CELL == DMU && L < LAYERS - 1;
        constexpr int count = hidden ? (SLOPES ? 2 : 1) : TRACED;
        float saved[elements(F) * larger(1, count)];  // for the trace
        multiply<L>();
        for_own<F>([&](int e, int row, int feature) {
            const bool real = t < until[row];
            float before[G];  // what the gates see
#pragma unroll
            for (int g = 0; g < G; ++g) {
                before[g] = total<L>(row, g * own + feature - rank * own);
                if (L == 0 && CELL != GRU) before[g] += x[e * G + g];
            }
            if constexpr (L == 0 && CELL != GRU) fetch(s + 1, e, row, feature);
            float* keep = saved + e * count;
            if constexpr (hidden) {
                keep[0] = activate(before[0]);
                if (SLOPES) keep[SLOPES] = slope_at(before[0]);
                send(row, feature, keep[0]);
            } else {
                const float next = update(e, real, before, keep);
                h[e] = real ? next : h[e];
                send(row, feature, h[e]);
            }
            if constexpr (L == 0 && CELL == GRU) fetch(s + 1, e, row, feature);
        });
        // The other warps wait for what was sent: they get it before memory does. Blocks of a cluster wait longer.
        if (CLUSTER > 1) store<L>(t, saved);
        all_sent<F>();
        if (CLUSTER == 1) store<L>(t, saved);
        if constexpr (L + 1 < LAYERS) layer<L + 1>(s, t);
    }

    // The new state of one element from what its gates see, and what the way back wants to know of it.
    DEVICE float update(int e, bool real, const float* v, float* saved) {
        if constexpr (CELL == DMU) {
            const Gate keep = gate(v[0]);
            saved[0] = v[0], saved[1] = tanh_of(v[1]);
            return h[e] * keep.open + saved[1] * keep.shut;
        } else if constexpr (CELL == RHN) {
            const Gate open = gate(v[1]);
            saved[0] = tanh_of(v[0]), saved[1] = open.open;
            return saved[0] * open.open + h[e] * open.shut;
        } else if constexpr (CELL == RNN) {
            return activate(v[0]);
        } else if constexpr (CELL == GRU) {
            const float* of_x = x + e * 3;
            const Gate keep = gate(of_x[1] + v[1]);
            saved[0] = sigmoid(of_x[0] + v[0]), saved[1] = keep.open, saved[3] = v[2];
            saved[2] = tanh_of(of_x[2] + saved[0] * v[2]);
            return h[e] * keep.open + saved[2] * keep.shut;
        } else {
            saved[0] = sigmoid(v[0]), saved[1] = sigmoid(v[1]), saved[2] = tanh_of(v[2]), saved[3] = sigmoid(v[3]);
            saved[4] = saved[1] * c[e] + saved[0] * saved[2];
            c[e] = real ? saved[4] : c[e];
            return saved[3] * tanh_of(saved[4]);
        }
    }

    // What a layer leaves in global memory.
    template <int L> DEVICE void store(int t, const float* saved) {
        constexpr bool hidden = CELL == DMU && L < LAYERS - 1;
        constexpr int count = hidden ? (SLOPES ? 2 : 1) : TRACED;
        constexpr int apart = hidden ? HIDDEN : D;
        constexpr int base = hidden ? widths_before(L) : CELL == DMU ? AFTER_HIDDEN : CELL == RHN ? 2 * D * L : 0;
        for_own<features(L)>([&](int e, int row, int feature) {
            if (!in_batch(row)) return;
            const bool real = t < until[row];
            if (SAVE && count) {
                float* step = a.trace + at<TRACE>(t, row, feature);
#pragma unroll
                for (int k = 0; k < count; ++k) step[base + k * apart] = real ? saved[e * count + k] : 0.f;
                if (CELL == RHN && L < LAYERS - 1) step[2 * D * LAYERS + L * D] = real ? h[e] : 0.f;
            }
            if (L == LAYERS - 1) a.y[at<D>(t, row, feature)] = real ? h[e] : 0.f;
        });
    }

    DEVICE void run_all() {
        for_own<D>([&](int e, int row, int feature) {
            const bool there = in_batch(row);
            h[e] = there ? a.h0[sequence(row) * D + feature] : 0.f;
            if (CELL == LSTM) c[e] = there ? a.c0[sequence(row) * D + feature] : 0.f;
        });
        for_own<D>([&](int e, int row, int feature) { send(row, feature, h[e]); });
        for_own<features(0)>([&](int e, int row, int feature) { fetch(begin, e, row, feature); });
        all_sent<D>();
        for (int s = begin; s < end; ++s) layer<0>(s, time(s));
        for_own<D>([&](int e, int row, int feature) {
            if (!in_batch(row)) return;
            a.h_n[sequence(row) * D + feature] = h[e];
            if (CELL == LSTM) a.c_n[sequence(row) * D + feature] = c[e];
        });
    }
};

// --- Backward ---------------------------------------------------------------------------------------------------

struct Behind : Sweep<true> {
    static constexpr int VALUES = CELL == DMU || CELL == RHN ? 2 : CELL == RNN ? 1 : CELL == GRU ? 4 : 6;
    float dh[OWN], dc[CELL == LSTM ? OWN : 1];
    // Of the step to come, fetched one step early: gradient of y, state before the step, gates.
    float grad[OWN], h_before[OWN], values[OWN * VALUES];
    const float* grad_y[OWN];  // of time 0
    // Of this step, fetched at its start: hidden activations or slopes of a dmu, inner values of an rhn.
    static constexpr int INNER = (CELL == DMU ? 1 : CELL == RHN ? 3 : 0) * elements_before(LAYERS - 1);
    float inner[INNER ? INNER : 1];

    DEVICE Behind(const Arguments& a) : Sweep(a) {}

    // What is fetched for padding, or for rows beyond the batch, is read from somewhere and used nowhere.
    template <int WIDTH>
    DEVICE float state_before(const float* start, const float* later, int s, int row, int feature) const {
        const int t = time(s), before = a.reverse ? t + 1 : t - 1;
        const bool first_step = s == 0 || before >= until[row];
        return *(first_step ? start + sequence(row) * D + feature : later + at<WIDTH>(before, row, feature));
    }

    DEVICE void fetch(int next) {
        const int s = larger(next, 0), t = time(s);
        for_own<D>([&](int e, int any_row, int feature) {
            const int row = smaller(any_row, rows - 1);
            if (a.grad_y) grad[e] = grad_y[e][t * a.grad_y_step];
            if (CELL != RHN || LAYERS == 1) h_before[e] = state_before<D>(a.h0, a.y, s, row, feature);
            const float* step = a.trace + at<TRACE>(t, row, feature);
            float* v = values + e * VALUES;
            if constexpr (CELL == DMU) {
                v[0] = step[AFTER_HIDDEN], v[1] = step[AFTER_HIDDEN + D];
            } else if constexpr (CELL == RHN) {
                v[0] = step[2 * D * (LAYERS - 1)], v[1] = step[2 * D * (LAYERS - 1) + D];
                if (LAYERS > 1) h_before[e] = step[2 * D * LAYERS + (LAYERS - 2) * D];
            } else if constexpr (CELL == RNN) {
                v[0] = a.y[at<D>(t, row, feature)];
            } else {
#pragma unroll
                for (int k = 0; k < (CELL == GRU ? 4 : 5); ++k) v[k] = step[k * D];
                if (CELL == LSTM) v[5] = state_before<TRACE>(a.c0, a.trace + 4 * D, s, row, feature);
            }
        });
    }

    template <int L> DEVICE void fetch_inner(int s, int t) {
        if constexpr (L >= 0) {
            for_own<features(L)>([&](int e, int any_row, int feature) {
                const int row = smaller(any_row, rows - 1);
                const float* step = a.trace + at<TRACE>(t, row, feature);
                if constexpr (CELL == DMU) {
                    inner[elements_before(L) + e] = step[(SLOPES ? HIDDEN : 0) + widths_before(L)];
                } else {
                    float* v = inner + 3 * (elements_before(L) + e);
                    v[0] = step[2 * D * L], v[1] = step[2 * D * L + D];
                    v[2] = L == 0 ? state_before<D>(a.h0, a.y, s, row, feature) : step[2 * D * LAYERS + (L - 1) * D];
                }
            });
            fetch_inner<L - 1>(s, t);
        }
    }

    // Deltas of one element's gates in layer L, from the gradient `g` of its state; returns what skips the product.
    template <int L> DEVICE float gate_deltas(float g, float before, const float* v, float* delta, float& dc) {
        if constexpr (CELL == DMU) {
            const Gate keep = gate(v[0]);
            delta[0] = g * (before - v[1]) * keep.open * keep.shut;
            delta[1] = g * keep.shut * (1.f - v[1] * v[1]);
            return g * keep.open;
        } else if constexpr (CELL == RHN) {
            delta[0] = g * v[1] * (1.f - v[0] * v[0]);
            delta[1] = g * (v[0] - before) * v[1] * (1.f - v[1]);
            return g * (1.f - v[1]);
        } else if constexpr (CELL == RNN) {
            delta[0] = g * slope_from(v[0]);
            return 0.f;
        } else if constexpr (CELL == GRU) {
            const float n = g * (1.f - v[1]) * (1.f - v[2] * v[2]);
            delta[0] = n * v[3] * v[0] * (1.f - v[0]);
            delta[1] = g * (before - v[2]) * v[1] * (1.f - v[1]);
            delta[2] = n * v[0];
            delta[3] = n;
            return g * v[1];
        } else {
            const float tanh_c = tanh_of(v[4]);
            const float of_c = dc + g * v[3] * (1.f - tanh_c * tanh_c);
            delta[0] = of_c * v[2] * v[0] * (1.f - v[0]);
            delta[1] = of_c * v[5] * v[1] * (1.f - v[1]);
            delta[2] = of_c * v[0] * (1.f - v[2] * v[2]);
            delta[3] = g * tanh_c * v[3] * (1.f - v[3]);
            dc = of_c * v[1];
            return 0.f;
        }
    }

    // From the gradient of the state after layer L of a step to that before it; L counts down.
    template <int L> DEVICE void state_layer(int s, int t) {
        constexpr int G = gates(L);
        constexpr bool top = L == LAYERS - 1;
        if constexpr (top && INNER > 0) fetch_inner<LAYERS - 2>(s, t);
        float carry[OWN], deltas[OWN * 4];
        for_own<D>([&](int e, int row, int feature) {
            const bool real = t < until[row];
            float* delta = deltas + e * 4;
            const float g = top ? dh[e] + grad[e] : dh[e];
            const float* v = top ? values + e * VALUES : inner + 3 * (elements_before(L) + e);
            float of_c = dc[CELL == LSTM ? e : 0];
            const float skips = gate_deltas<L>(g, top ? h_before[e] : v[2], v, delta, of_c);
            carry[e] = real ? skips : dh[e];
            if (CELL == LSTM) dc[e] = real ? of_c : dc[e];
#pragma unroll
            for (int k = 0; k < (CELL == GRU ? 4 : G); ++k) delta[k] = real ? delta[k] : 0.f;
#pragma unroll
            for (int g = 0; g < G; ++g) send(row, g * D + feature, delta[g]);
        });
        const auto store = [&] {
            for_own<D>([&](int e, int row, int feature) {
                if (!in_batch(row)) return;
                const float* delta = deltas + e * 4;
                float* step = a.deltas + at<DELTAS>(t, row, outputs_before(L) + feature);
#pragma unroll
                for (int g = 0; g < G; ++g) step[g * D] = delta[CELL == GRU && g == 2 ? 3 : g];
                if (CELL == GRU) step[3 * D] = delta[2];
            });
        };
        if (CLUSTER > 1) store();
        all_sent<G * D>();
        if (CLUSTER == 1) store();
        if constexpr (CELL == DMU && LAYERS > 1) {
            multiply<L>();
            hidden_layer<L - 1>(s, t, carry);
        } else {
            if constexpr (top) fetch(s - 1);
            multiply<L>();
            for_own<D>([&](int e, int row, int feature) {
                dh[e] = carry[e] + total<L>(row, feature - rank * slice(D));
            });
            if constexpr (L > 0) state_layer<L - 1>(s, t);
        }
    }

    // A hidden layer of a dmu: the product of the layer above has just been taken.
    template <int L> DEVICE void hidden_layer(int s, int t, const float* carry) {
        constexpr int F = features(L);
        float delta[elements(F)];
        for_own<F>([&](int e, int row, int feature) {
            const float of_input = total<L + 1>(row, feature - rank * slice(F));
            delta[e] = t < until[row] ? of_input * slope_from(inner[elements_before(L) + e]) : 0.f;
            send(row, feature, delta[e]);
        });
        const auto store = [&] {
            for_own<F>([&](int e, int row, int feature) {
                if (in_batch(row)) a.deltas[at<DELTAS>(t, row, outputs_before(L) + feature)] = delta[e];
            });
        };
        if (CLUSTER > 1) store();
        if constexpr (L == LAYERS - 2) fetch(s - 1);
        all_sent<F>();
        if (CLUSTER == 1) store();
        multiply<L>();
        if constexpr (L > 0) {
            hidden_layer<L - 1>(s, t, carry);
        } else {
            for_own<D>([&](int e, int row, int feature) {
                dh[e] = carry[e] + total<0>(row, feature - rank * slice(D));
            });
        }
    }

    DEVICE void run_all() {
        for_own<D>([&](int e, int row, int feature) {
            const bool there = in_batch(row);
            dh[e] = there && a.h_n ? a.h_n[sequence(row) * D + feature] : 0.f;
            grad[e] = 0.f;
            grad_y[e] = a.grad_y + run * a.grad_y_run + (first + smaller(row, rows - 1)) * a.grad_y_row +
                        feature * a.grad_y_feature;
            if (CELL == LSTM) dc[e] = there && a.c_n ? a.c_n[sequence(row) * D + feature] : 0.f;
        });
        fetch(end - 1);
        for (int s = end - 1; s >= begin; --s) state_layer<LAYERS - 1>(s, time(s));
        for_own<D>([&](int e, int row, int feature) {
            if (!in_batch(row)) return;
            if (a.grad_h0) a.grad_h0[sequence(row) * D + feature] = dh[e];
            if (CELL == LSTM && a.grad_c0) a.grad_c0[sequence(row) * D + feature] = dc[e];
        });
    }
};

// --- Weight gradients: all of a layer's products over time and batch in one launch ----------------------------------

// A term is the gradient of one weight, or of some of its rows: the sum over (t, b) of deltas times what the weight
// saw.
enum { OF_X, OF_STATE, OF_TRACE, OF_ONES };  // OF_STATE: the state before the step; OF_ONES: a bias
struct Term {
    int64 left, lefts;            // features of the deltas
    int64 source, right, rights;  // and of what the weight saw
    int64 out, out_run;           // where its result begins, and how far runs are apart
    int64 tile;                   // the first of its tiles
};
constexpr int TERMS = smaller(2 * LAYERS + 4, 50);  // arguments of a kernel have 4 KB
struct Products {          // as Arguments, a row of int64
    const float* deltas;   // [R, T, B, DELTAS]
    const float* x;        // [R, T, B, inputs] with the strides below
    const float* h0;       // [R, B, D]
    const float* y;        // [R, T, B, D]
    const float* trace;    // [R, T, B, TRACE]
    const int64* lengths;  // [R, B] or null
    float* out;            // [pieces, total]
    int64 x_run, x_step, x_row;
    int64 steps, batch, reverse;
    int64 pieces, tiles, total;
    int64 terms;
    Term term[TERMS];
};
// A block makes TILE x TILE outputs. A thread fetches columns of a tile, so small layers have small ones.
constexpr int most_outputs(int l) { return l == LAYERS ? 0 : larger(gates(l) * features(l), most_outputs(l + 1)); }
constexpr int TILE = most_outputs(0) <= 8 ? 8 : most_outputs(0) <= 16 ? 16 : most_outputs(0) <= 32 ? 32 : 64;
constexpr int CHUNK = 2048 / TILE;  // rows in shared memory
constexpr int PRODUCT_THREADS = 256;
constexpr int TILE_STRIDE = TILE + 4;  // neighbouring rows begin in different banks
constexpr int PRODUCTS_SHARED = 2 * CHUNK * TILE_STRIDE;  // floats

// One tile of one term, over one piece of the rows (t, b) of one run. A thread makes 4 x 4 outputs; where a tile is
// narrow the threads that are left over take other rows of the chunk.
struct ProductTile {
    static constexpr int ROW_STEP = PRODUCT_THREADS / TILE, FETCHED = CHUNK / ROW_STEP;
    const Products& p;
    const Term& term;
    const int run, batch;
    int left0, right0, lefts, rights;
    // A thread fetches one column of either side.
    const float* delta;             // at the row that comes next
    const float* from;              // what the weight saw is at from[t * step + b * row]
    const float* start;             // [B, D] the state before a sequence's first step
    int64 step, row;
    int next, end, t, b;            // the row that comes next, also as a time and a sequence
    float next_left[FETCHED], next_right[FETCHED];

    DEVICE static const Term& term_of(const Products& p, int tile) {
        int k = 0;
        while (k + 1 < p.terms && p.term[k + 1].tile <= tile) ++k;
        return p.term[k];
    }

    DEVICE ProductTile(const Products& p)
        : p(p), term(term_of(p, block_x() % int(p.tiles))), run(block_y()), batch(int(p.batch)) {
        const int across = ceil_div(int(term.rights), TILE), tile = block_x() % int(p.tiles) - int(term.tile);
        left0 = tile / across * TILE, right0 = tile % across * TILE;
        lefts = smaller(TILE, int(term.lefts) - left0), rights = smaller(TILE, int(term.rights) - right0);

        const int rows = int(p.steps) * batch, share = ceil_div(rows, int(p.pieces));
        const int begin = block_x() / int(p.tiles) * share;
        next = begin + thread_index() / TILE, end = smaller(begin + share, rows);
        t = next / batch, b = next % batch;
        const int column = thread_index() % TILE;
        const int64 all = int64(run) * rows, right = right0 + column;
        delta = p.deltas + (all + next) * DELTAS + term.left + left0 + column;
        start = p.h0 + int64(run) * batch * D + right;
        if (term.source == OF_X) {
            from = p.x + run * p.x_run + right, step = p.x_step, row = p.x_row;
        } else if (term.source == OF_STATE) {
            row = D, step = int64(batch) * D, from = p.y + all * D + right + (p.reverse ? step : -step);
        } else {
            row = TRACE, step = int64(batch) * TRACE, from = p.trace + all * TRACE + term.right + right;
        }
    }

    DEVICE float seen() const {
        if (term.source == OF_ONES) return 1.f;
        if (term.source != OF_TRACE) {
            const int until = int(p.lengths ? p.lengths[run * p.batch + b] : p.steps);
            if (term.source == OF_X) {
                if (t >= until) return 0.f;  // what stands in the padding of x, NaN included, must not get into a sum
            } else {
                const int before = p.reverse ? t + 1 : t - 1;
                if (before < 0 || before >= until) return start[b * D];
            }
        }
        return from[t * step + b * row];
    }

    DEVICE void fetch() {
        const int column = thread_index() % TILE;
#pragma unroll
        for (int k = 0; k < FETCHED; ++k) {
            next_left[k] = next < end && column < lefts ? *delta : 0.f;
            next_right[k] = next < end && column < rights ? seen() : 0.f;
            delta += ROW_STEP * DELTAS, next += ROW_STEP, b += ROW_STEP;
            while (b >= batch) b -= batch, ++t;
        }
    }

    DEVICE void run_all() {
        float* left = shared_memory;
        float* right = shared_memory + CHUNK * TILE_STRIDE;
        const int across = ceil_div(rights, 4), cells = ceil_div(lefts, 4) * across, groups = PRODUCT_THREADS / cells;
        const int group = thread_index() / cells, cell = thread_index() % cells;
        const int own = thread_index() / TILE * TILE_STRIDE + thread_index() % TILE;
        const float* l = left + cell / across * 4;
        const float* r = right + cell % across * 4;
        float sum[16];
#pragma unroll
        for (int k = 0; k < 16; ++k) sum[k] = 0.f;
        int rows_left = end - (next - thread_index() / TILE);
        fetch();
        for (; rows_left > 0; rows_left -= CHUNK) {
#pragma unroll
            for (int k = 0; k < FETCHED; ++k) {
                left[own + k * ROW_STEP * TILE_STRIDE] = next_left[k];
                right[own + k * ROW_STEP * TILE_STRIDE] = next_right[k];
            }
            block_barrier();
            fetch();
#pragma unroll 4
            for (int i = group < groups ? group : CHUNK; i < CHUNK; i += groups) {
                const Quad a = *reinterpret_cast<const Quad*>(l + i * TILE_STRIDE);
                const Quad b = *reinterpret_cast<const Quad*>(r + i * TILE_STRIDE);
                sum[0] += a.x * b.x, sum[1] += a.x * b.y, sum[2] += a.x * b.z, sum[3] += a.x * b.w;
                sum[4] += a.y * b.x, sum[5] += a.y * b.y, sum[6] += a.y * b.z, sum[7] += a.y * b.w;
                sum[8] += a.z * b.x, sum[9] += a.z * b.y, sum[10] += a.z * b.z, sum[11] += a.z * b.w;
                sum[12] += a.w * b.x, sum[13] += a.w * b.y, sum[14] += a.w * b.z, sum[15] += a.w * b.w;
            }
            block_barrier();
        }
        // Groups of threads saw different rows: add them up in the memory that the chunks leave free.
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (group < groups) shared_memory[k * PRODUCT_THREADS + thread_index()] = sum[k];
        block_barrier();
        float* out = p.out + block_x() / int(p.tiles) * p.total + run * term.out_run + term.out;
        for (int o = thread_index(); o < 4 * across * lefts; o += PRODUCT_THREADS) {
            const int i = o / (4 * across), j = o % (4 * across);
            const float* of_cell = shared_memory + (i % 4 * 4 + j % 4) * PRODUCT_THREADS + i / 4 * across + j / 4;
            float all = 0.f;
            for (int g = 0; g < groups; ++g) all += of_cell[g * cells];
            if (j < rights) out[int64(left0 + i) * term.rights + right0 + j] = all;
        }
    }
};
static_assert(16 * PRODUCT_THREADS <= PRODUCTS_SHARED, "the sums of all threads fit into the memory of a chunk");

#ifndef EMULATED
#if CLUSTER > 1
#define LAYOUT __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
#else
#define LAYOUT __launch_bounds__(THREADS)
#endif
extern "C" __global__ void LAYOUT sweep_ahead(const __grid_constant__ Arguments a) { Ahead(a).run_all(); }
#if SAVE  // nobody goes back where nothing was saved
extern "C" __global__ void LAYOUT sweep_back(const __grid_constant__ Arguments a) { Behind(a).run_all(); }
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS) sum_products(const __grid_constant__ Products p) {
    ProductTile(p).run_all();
}
#endif
#endif
