// Products of the weights that a block owns with its rows' inputs.

constexpr int PADDED_ROWS = TENSOR_CORES ? round_up(ROWS, 8) : ROWS;

// Four weights as they stay in shared memory, where those of exact products in half precision take half of the room, and of
// the time to read them.
template <class T> struct alignas(8) PackedQuad { unsigned words[2]; };
constexpr bool PACKED = !TENSOR_CORES && sizeof(Value) == 2;
template <bool> struct StayingQuad { typedef Quad type; };
template <> struct StayingQuad<true> { typedef PackedQuad<Value> type; };
typedef StayingQuad<PACKED>::type Staying;
DEVICE Quad unpacked(const Quad& q) { return q; }
template <class T> DEVICE Quad unpacked(const PackedQuad<T>& q) {
    T numbers[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) take(numbers[k], q.words, k);
    return {to_float(numbers[0]), to_float(numbers[1]), to_float(numbers[2]), to_float(numbers[3])};
}

template <int STAGE, bool BACK> struct Product;
template <int STAGE> struct Product<STAGE, false> {  // from a layer's inputs to its outputs
    static constexpr int in = inputs(STAGE), own = slice(features(STAGE)), out = gates(STAGE) * own;
};
template <int STAGE> struct Product<STAGE, true> {  // from the deltas of a layer's outputs to its inputs
    static constexpr int in = gates(STAGE) * all_slices(features(STAGE)), own = slice(inputs(STAGE)), out = own;
};

// Who multiplies what: a warp takes an item, which is a group of outputs and a slice of the inputs or, where sums are finished
// DIRECTly, a group of features with all gates, all inputs and a part of the rows.
template <int STAGE, bool BACK> struct Spread {
    using P = Product<STAGE, BACK>;
    static constexpr int at_once = OUTPUTS_AT_ONCE[BACK][STAGE];
    static constexpr int width = BACK ? inputs(STAGE) : features(STAGE), gates_of = BACK ? 1 : gates(STAGE);
    static constexpr int lanes = TENSOR_CORES || DIRECT ? 32 : 32 / ROW_GROUPS[BACK][STAGE];  // with weights of their own
    static constexpr int rows = TENSOR_CORES ? PADDED_ROWS  // of a lane, or of a tile
                              : DIRECT ? rows_of_item(width) : ROWS / ROW_GROUPS[BACK][STAGE];
    static constexpr int quads = TENSOR_CORES ? 2 * at_once : at_once;  // of weights that a lane has for one unit
    static constexpr int outputs = (TENSOR_CORES ? 16 : DIRECT ? SIDE_BY_SIDE : lanes) * at_once;  // of an item
    static constexpr int unit = TENSOR_CORES ? 64 / int(sizeof(Input)) : 4 * SHARING;
    // STRAIGHT: with those of blocks that own padding alone, or nobody would wait for these.
    static constexpr int units = ceil_div(!BACK && STRAIGHT[0] ? all_slices(inputs(STAGE)) : P::in, unit);
    static constexpr int units_per_item = UNITS[BACK][STAGE];
    static constexpr int groups = DIRECT ? feature_groups(width) : ceil_div(P::out, outputs);
    static constexpr int slices = ceil_div(units, units_per_item), sets = groups * slices;  // of weights
    static constexpr int items = sets * (DIRECT ? row_parts(width) : 1), items_per_warp = ceil_div(items, WARPS);
    static constexpr int padded_inputs = slices * units_per_item * unit;
    static constexpr int padded_outputs = groups * outputs;
    static constexpr int sum_stride = padded_outputs + (TENSOR_CORES ? 4 : 0);  // keeps lanes in different banks
    static constexpr int sums = DIRECT ? 0 : slices * ROWS * sum_stride;
    static constexpr int quads_of_unit = sets * quads * lanes;  // of all items
    static constexpr int kept = KEPT[BACK][STAGE], shared = SHARED[BACK][STAGE];
    static constexpr int streamed = layers_of<STAGE> * units_per_item - kept - shared;
    static constexpr int rows_of_unit = ceil_div(quads * lanes, 32);  // of 32 quads, in a warp's stream
    static_assert(!STRAIGHT[BACK] || (groups == 1 && items <= WARPS));
    static_assert(!DIRECT || (slices == 1 && at_once == gates_of * features_of_lane(width)));
    // The j-th output of a lane (exact multiplications), P::out where there is none.
    DEVICE static int output(int group, int j, int lane) {
        if (!DIRECT) return (group * at_once + j) * lanes + lane;
        const int feature = (group * features_of_lane(width) + j / gates_of) * SIDE_BY_SIDE + lane % SIDE_BY_SIDE;
        return feature < P::own ? j % gates_of * P::own + feature : P::out;
    }
};

// Sizes that all layers of a sweep share.
template <bool BACK, int STAGE = 0> constexpr int widest_row() {
    if constexpr (STAGE == STAGES) return 0;
    else return larger(larger(Spread<STAGE, BACK>::padded_inputs, all_slices(inputs(STAGE))), widest_row<BACK, STAGE + 1>());
}
template <bool BACK> constexpr int row_stride() {  // in inputs
    constexpr int row = widest_row<BACK>(), bytes = round_up(row * int(sizeof(Input)), 64);
    if (!TENSOR_CORES) return row;
    return (bytes % 128 ? bytes : bytes + 64) / int(sizeof(Input));  // neighbours begin in different halves of the banks
}
template <bool BACK> constexpr int buffer_floats() { return ROWS * row_stride<BACK>() * int(sizeof(Input)) / 4; }
// Columns behind a product's INPUTS that it reads too, and where a layer with more inputs may have left something: zero
// weights do not hide NaN.
template <bool BACK, int STAGE> constexpr int inputs_sent() {
    return BACK ? Product<STAGE, BACK>::in : all_slices(inputs(STAGE));
}
template <bool BACK, int STAGE = 0> constexpr int most_inputs_sent() {
    if constexpr (STAGE == STAGES) return 0;
    else return larger(inputs_sent<BACK, STAGE>(), most_inputs_sent<BACK, STAGE + 1>());
}
template <bool BACK, int INPUTS, int STAGE = 0> constexpr int stale_columns(int most_sent = 0, int read = 0) {
    if constexpr (STAGE == STAGES) return most_sent > INPUTS ? larger(0, read - INPUTS) : 0;
    else {
        constexpr int sent = inputs_sent<BACK, STAGE>();
        return stale_columns<BACK, INPUTS, STAGE + 1>(
            larger(most_sent, sent), sent == INPUTS ? larger(read, Spread<STAGE, BACK>::padded_inputs) : read);
    }
}
template <bool BACK, int STAGE = 0> constexpr int sums_size() {
    if constexpr (STAGE == STAGES) return 0;
    else return larger(Spread<STAGE, BACK>::sums, sums_size<BACK, STAGE + 1>());
}
template <bool BACK, int STAGE = 0> constexpr int most_own_sums() {  // of a thread, where it finishes them DIRECTly
    if constexpr (!DIRECT || STAGE == STAGES) return 1;
    else {
        using S = Spread<STAGE, BACK>;
        return larger(elements(S::width) * S::gates_of, most_own_sums<BACK, STAGE + 1>());
    }
}
template <bool BACK, int STAGE = 0> constexpr int quads_in_shared() {
    if constexpr (STAGE == STAGES) return 0;
    else {
        using S = Spread<STAGE, BACK>;
        return S::shared * S::quads_of_unit + quads_in_shared<BACK, STAGE + 1>();
    }
}
// A slot has several small units of an item, or a large unit takes several slots.
template <int STAGE, bool BACK> constexpr int units_of_slot = larger(1, SLOT[BACK] / Spread<STAGE, BACK>::rows_of_unit);
template <int STAGE, bool BACK> constexpr int slots_of_unit = ceil_div(Spread<STAGE, BACK>::rows_of_unit, SLOT[BACK]);
// Of all units of a stage's layers the first ones are on the chip: how many of this layer. In DIRECT sweeps layers that share
// their code are there as a whole or not at all, in turn: while one is there, those of the next are on their way.
template <int STAGE, bool BACK> constexpr int layers_on_chip = Spread<STAGE, BACK>::shared / Spread<STAGE, BACK>::units_per_item;
template <int STAGE, bool BACK> constexpr int on_chip_before(int layer) {
    if (!DIRECT || layers_of<STAGE> == 1) return layer;
    return layer * layers_on_chip<STAGE, BACK> / layers_of<STAGE>;
}
template <int STAGE, bool BACK> constexpr int layer_on_chip(int place) {  // which layer is at this place
    if (!DIRECT || layers_of<STAGE> == 1) return place;
    return ceil_div((place + 1) * layers_of<STAGE>, larger(1, layers_on_chip<STAGE, BACK>)) - 1;
}
template <int STAGE, bool BACK> constexpr int units_on_chip(int layer) {
    using S = Spread<STAGE, BACK>;
    if (DIRECT && layers_of<STAGE> > 1)
        return (on_chip_before<STAGE, BACK>(layer + 1) - on_chip_before<STAGE, BACK>(layer)) * S::units_per_item;
    return smaller(larger(S::kept + S::shared - layer * S::units_per_item, 0), S::units_per_item);
}
template <int STAGE, bool BACK> constexpr int slots_of_layer(int layer) {  // and of an item
    const int units = Spread<STAGE, BACK>::units_per_item - units_on_chip<STAGE, BACK>(layer);
    return ceil_div(units, units_of_slot<STAGE, BACK>) * slots_of_unit<STAGE, BACK>;
}
template <bool BACK, int STAGE = 0> constexpr int streamed_slots() {  // of a warp at most
    if constexpr (STAGE == STAGES) return 0;
    else {
        int all = 0;
        for (int layer = 0; layer < layers_of<STAGE>; ++layer) all += slots_of_layer<STAGE, BACK>(layer);
        return all * Spread<STAGE, BACK>::items_per_warp + streamed_slots<BACK, STAGE + 1>();
    }
}
template <bool BACK, int STAGE = 0> constexpr bool one_slot_each() {  // for each item of a layer, with a row for each quad
    if constexpr (STAGE == STAGES) return true;
    else {
        int most = 0;
        for (int layer = 0; layer < layers_of<STAGE>; ++layer) most = larger(most, slots_of_layer<STAGE, BACK>(layer));
        return (most == 0 || (most == 1 && Spread<STAGE, BACK>::lanes == 32)) && one_slot_each<BACK, STAGE + 1>();
    }
}
template <bool BACK> constexpr int streamed_quads() { return WARPS * streamed_slots<BACK>() * SLOT[BACK] * 32; }
template <bool BACK> constexpr int ring_floats() {  // with a barrier of 8 bytes for each slot
    return AHEAD[BACK] * WARPS * SLOT[BACK] * 128 + round_up(AHEAD[BACK] * WARPS * 2, 4);
}
template <bool BACK, int STAGE = 0> constexpr int biases_in_shared() {  // of layers that share their code
    if constexpr (BACK || STAGE == STAGES) return 0;
    else {
        constexpr int own = layers_of<STAGE> > 1 ? layers_of<STAGE> * Spread<STAGE, BACK>::padded_outputs : 0;
        return own + biases_in_shared<BACK, STAGE + 1>();
    }
}
// What a team has in global memory: buffers in turn. One is poisoned two exchanges after its own, and a fence, after every
// TEAM_FENCE exchanges, makes sure of it before its next one (see README.md).
constexpr int TEAM_BUFFERS = 16, TEAM_FENCE = 8;
static_assert((TEAM_BUFFERS & (TEAM_BUFFERS - 1)) == 0 && TEAM_FENCE <= TEAM_BUFFERS - 3);
template <bool BACK> constexpr int team_row(int inputs) {  // words of 16 bytes; a warp reads neighbours of several rows at once
    return round_up(inputs / SENT_TOGETHER, STRAIGHT[BACK] ? 8 : 1);
}
template <bool BACK> constexpr int team_buffer_words() { return TEAM ? ROWS * team_row<BACK>(most_inputs_sent<BACK>()) : 0; }
// Shared memory, in floats: barriers, buffers of rows, partial sums, lengths of the rows, biases, weights that stay, weights
// on their way. A team, whose other buffers are in global memory, has one of rows or, if it takes them STRAIGHT, none.
constexpr int BARRIERS = 4, ROW_BUFFERS = TEAM ? 1 : 2;
template <bool BACK> constexpr int rows_in_shared() { return STRAIGHT[BACK] ? 0 : ROW_BUFFERS * buffer_floats<BACK>(); }
template <bool BACK> constexpr int shared_size() {
    return BARRIERS + rows_in_shared<BACK>() + sums_size<BACK>() + round_up(ROWS, 4) +
           round_up(biases_in_shared<BACK>(), 4) + int(sizeof(Staying)) / 4 * quads_in_shared<BACK>() + ring_floats<BACK>();
}

// Weights that find no room on the chip come from global memory at every step, always in the same order. Each warp has an
// endless sequence of slots of its own. Where AHEAD is not zero it fetches them that many slots early, into a ring in shared
// memory: while blocks wait for one another, weights are on their way. Elsewhere it HOLDS the next one in registers, where a
// layer takes no more than one.
template <bool BACK> struct Stream {
    static constexpr int LENGTH = AHEAD[BACK], QUADS = SLOT[BACK] * 32;  // of a slot
    static constexpr bool RING = LENGTH > 0, HOLDS = !RING && one_slot_each<BACK>();
    Quad* ring;         // [LENGTH, QUADS] of this warp
    Arrival* arrivals;  // [LENGTH]
    Quad* far;          // [slots, QUADS] in global memory
    int slots;          // 0: this warp has none
    int slot = 0, next = 0;  // in the ring, and in global memory
    unsigned turn = 0;       // counts the rounds of the ring
    int owed = 0;            // slots that have been used, and are released where there is time for it
    Quad held[HOLDS ? SLOT[BACK] : 1];

    DEVICE void place(void* shared, Quad* in_global) {
        const int warp = thread_index() / 32;
        ring = static_cast<Quad*>(shared) + warp * (LENGTH * QUADS);
        arrivals = reinterpret_cast<Arrival*>(static_cast<Quad*>(shared) + WARPS * (LENGTH * QUADS)) + warp * LENGTH;
        far = in_global + warp * (streamed_slots<BACK>() * QUADS);
        for (int k = 0; k < LENGTH; ++k) open_arrival(arrivals + k);
    }
    DEVICE void advance() { next = next + 1 == slots ? 0 : next + 1; }
    DEVICE void fetch(int to) {
        fetch_to_shared<QUADS>(ring + to * QUADS, far + next * QUADS, arrivals + to);
        advance();
    }
    DEVICE void start() {
        if (slots == 0) return;
        for (int k = 0; k < LENGTH; ++k) fetch(k);
        if constexpr (HOLDS) hold();
    }
    DEVICE void hold() {
#pragma unroll
        for (int r = 0; r < SLOT[BACK]; ++r) held[r] = from_l2(far + next * QUADS + r * 32 + thread_index() % 32);
    }
    DEVICE const Quad* arrived(int k) const {  // slot k from here on
        if (!RING) return far + (next + k) * QUADS;  // a layer's slots follow one another
        const bool around = slot + k >= LENGTH;
        const int at = around ? slot + k - LENGTH : slot + k;
        wait_for(arrivals + at, (turn + around) & 1);
        return ring + at * QUADS;
    }
    DEVICE void finish() const {  // nothing may come to the memory of a block that has ended
        if (RING && slots)
            for (int k = 0; k < LENGTH; ++k) arrived(k);
    }
    DEVICE static Quad read(const Quad* at) { return RING ? from_ring(at) : from_l2(at); }
    template <int COUNT> DEVICE void release() {  // what has arrived has been used
        if constexpr (RING) {
            warp_barrier();
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                fetch(slot);
                if (++slot == LENGTH) slot = 0, ++turn;
            }
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; ++k) advance();
            if constexpr (HOLDS) hold();
        }
    }
    DEVICE void settle() {
#pragma unroll 1
        for (; owed > 0; --owed) release<1>();
    }
};

// A lane's sums of some outputs of some rows, in exact float32. A unit is four inputs or, where lanes share them, four of each.
template <int STAGE, bool BACK> struct FmaSums {
    using S = Spread<STAGE, BACK>;
    static constexpr int J = S::at_once, K = S::rows, STRIDE = row_stride<BACK>();
    static constexpr int chains = K * J >= 4 ? 1 : 4 / (K * J);  // of additions that do not wait for one another
    float sum[K * J * chains];
    const int row;  // the first of this lane
    const Quad* in;

    DEVICE static int output(int group, int j) { return S::output(group, j, thread_index() % S::lanes); }
    DEVICE FmaSums(const Input* rows, int slice, const float* bias)  // or a part of the rows, where sums are finished DIRECTly
        : row((DIRECT ? slice : thread_index() % 32 / S::lanes) * K),
          in(reinterpret_cast<const Quad*>(rows + row * STRIDE) +
             (DIRECT ? thread_index() % 32 / SIDE_BY_SIDE : slice * S::units_per_item)) {
#pragma unroll
        for (int k = 0; k < K * J * chains; ++k) sum[k] = k % chains ? 0.f : bias[k / chains % J];
    }
    DEVICE void read(Quad* to, int q) const {  // unit q of each row
#pragma unroll
        for (int r = 0; r < K; ++r) to[r] = in[r * (STRIDE / 4) + q * SHARING];
    }
    DEVICE void add(const Quad* w, int q) {
#pragma unroll
        for (int r = 0; r < K; ++r) add(w, in[r * (STRIDE / 4) + q * SHARING], r);
    }
    DEVICE void add(const Quad* w, const Quad* of_rows) {
#pragma unroll
        for (int r = 0; r < K; ++r) add(w, of_rows[r], r);
    }
    DEVICE void add(const Quad* w, const Quad a, int r) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
            float* to = sum + (r * J + j) * chains;
            to[0] += w[j].x * a.x;
            to[1 % chains] += w[j].y * a.y;
            to[2 % chains] += w[j].z * a.z;
            to[3 % chains] += w[j].w * a.w;
        }
    }
    DEVICE void store(float* sums, int slice, int group) const {  // to sums[slice, row, output]
#pragma unroll
        for (int k = 0; k < K * J; ++k) {
            float all = sum[k * chains];
#pragma unroll
            for (int c = 1; c < chains; ++c) all += sum[k * chains + c];
            sums[(slice * ROWS + row + k / J) * S::sum_stride + output(group, k % J)] = all;
        }
    }
    // Adds up what lanes have of the same outputs, so that each has the whole sums of its own elements: own[element, gate].
    DEVICE void finish(float* own) const {
        constexpr int count = divided(S::width), G = S::gates_of;
        float all[count * G];
#pragma unroll
        for (int k = 0; k < count * G; ++k) {
            all[k] = k < K * J ? sum[k % (K * J) * chains] : 0.f;
#pragma unroll
            for (int c = 1; c < chains; ++c) all[k] += k < K * J ? sum[k % (K * J) * chains + c] : 0.f;
        }
        divide<count, 16>(all);
#pragma unroll
        for (int k = 0; k < elements_of_item(S::width) * G; ++k) own[k] = all[k];
    }
    // Lanes that are APART give each other half of what they have; where it is one element, both have it.
    template <int COUNT, int APART> DEVICE static void divide(float* all) {
        if constexpr (APART >= SIDE_BY_SIDE) {
            constexpr int left = (COUNT + 1) / 2 * S::gates_of, other = COUNT / 2 * S::gates_of;
            const bool upper = thread_index() & APART;
#pragma unroll
            for (int k = 0; k < left; ++k) {
                const float given = upper ? all[k] : all[other + k], mine = upper ? all[other + k] : all[k];
                all[k] = mine + from_lane_across(given, APART);
            }
            divide<(COUNT + 1) / 2, APART / 2>(all);
        }
    }
};

// A warp's sums of tiles of 16 outputs and 8 rows, by the tensor cores. A unit is 16 words of a row's inputs; a lane reads
// four neighbours of them, which are its parts of two products. The order of inputs within a unit is ours to choose.
template <int STAGE, bool BACK> struct MmaSums {
    using S = Spread<STAGE, BACK>;
    static constexpr int J = S::at_once, TILES = PADDED_ROWS / 8;
    static constexpr int SENT = inputs_sent<BACK, STAGE>();
    static constexpr int STRIDE = STRAIGHT[BACK] ? team_row<BACK>(SENT) : row_stride<BACK>() / SENT_TOGETHER;
    static_assert(!STRAIGHT[BACK] || S::padded_inputs >= SENT, "a block that nobody waits for falls behind");
    static constexpr int SUMS = J * TILES * 4, CHAINS = SPLIT && J * TILES < 4 ? 3 : 1;  // that do not wait for one another
    float sum[CHAINS * SUMS];
    const Words* in;
    int of_last_tile;  // where the lane's row of the last tile is; rows that do not exist are read as the last one that does

    // Bias j is that of a lane's first or second output of tile j / 2.
    DEVICE static int output(int group, int j) {
        return group * S::outputs + j / 2 * 16 + j % 2 * 8 + thread_index() % 32 / 4;
    }
    DEVICE MmaSums(const Input* rows, int slice, const float* bias) {
        const int lane = thread_index() % 32, row = lane / 4;
        in = reinterpret_cast<const Words*>(rows) + (ROWS < 8 ? smaller(row, ROWS - 1) : row) * STRIDE +
             slice * S::units_per_item * 4 + lane % 4;
        of_last_tile = TILES == 1 ? 0 : (smaller(TILES * 8 - 8 + row, ROWS - 1) - row) * STRIDE;
#pragma unroll
        for (int k = 0; k < SUMS; ++k) sum[k] = bias[k / (TILES * 4) * 2 + k % 4 / 2];
#pragma unroll
        for (int k = SUMS; k < CHAINS * SUMS; ++k) sum[k] = 0.f;
    }
    DEVICE const Words* input(int tile, int q) const {
        return in + (ROWS % 8 && tile == TILES - 1 ? of_last_tile : tile * 8 * STRIDE) + q * 4;
    }
    // Inputs of COUNT units, which other blocks of a team send; the tensor cores want all lanes.
    template <int COUNT> DEVICE void receive(Words* b, int slice, int begin) const {
        const int lane = thread_index() % 32, left = SENT / SENT_TOGETHER - slice * S::units_per_item * 4 - lane % 4;
        const auto is_sent = [&](int k) {  // what is not in the row, or in no row, is not
            const int q = begin + k / TILES, row = k % TILES * 8 + lane / 4;
            return q < S::units_per_item && q * 4 < left && row < ROWS;
        };
        receive_words<COUNT * TILES, true>(b, is_sent, [&](int k) { return input(k % TILES, begin + k / TILES); });
    }
    DEVICE void add(const Quad* w, int q) {
        Words b[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) b[tile] = *input(tile, q);
        add(w, b);
    }
    DEVICE void add(const Quad* w, const Words* b) {
        if constexpr (SPLIT) {
            Words near[TILES], left[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) near[tile] = nearest(b[tile]), left[tile] = rest(b[tile], near[tile]);
#pragma unroll
            for (int j = 0; j < J; ++j) {  // what is left of both would be beyond float32
                const Words first = words(w[2 * j]), second = words(w[2 * j + 1]);
                const Words near_first = nearest(first), near_second = nearest(second);
                add<CHAINS - 1>(j, rest(first, near_first), rest(second, near_second), near);
                add<CHAINS / 2>(j, near_first, near_second, left);
                add<0>(j, near_first, near_second, near);
            }
        } else {
#pragma unroll
            for (int j = 0; j < J; ++j) add<0>(j, words(w[2 * j]), words(w[2 * j + 1]), b);
        }
    }
    template <int CHAIN> DEVICE void add(int j, const Words& first, const Words& second, const Words* b) {
        float* to = sum + CHAIN * SUMS + j * TILES * 4;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) multiply_tile(to + tile * 4, first, b[tile].x, b[tile].y, Input());
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) multiply_tile(to + tile * 4, second, b[tile].z, b[tile].w, Input());
    }
    DEVICE static Words words(const Quad& q) { return {bits_of(q.x), bits_of(q.y), bits_of(q.z), bits_of(q.w)}; }
    DEVICE void store(float* sums, int slice, int group) const {
        const int row = thread_index() % 4 * 2;
#pragma unroll
        for (int j = 0; j < J; ++j)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (ROWS % 8 == 0 || tile * 8 + row + k % 2 < ROWS)
                        sums[(slice * ROWS + tile * 8 + row + k % 2) * S::sum_stride + output(group, 2 * j + k / 2)] =
                            whole((j * TILES + tile) * 4 + k);
    }
    DEVICE float whole(int k) const {
        return CHAINS == 1 ? sum[k] : sum[k] + (sum[k + CHAINS / 2 * SUMS] + sum[k + (CHAINS - 1) * SUMS]);
    }
};
template <bool, int STAGE, bool BACK> struct SumsOf { typedef FmaSums<STAGE, BACK> type; };
template <int STAGE, bool BACK> struct SumsOf<true, STAGE, BACK> { typedef MmaSums<STAGE, BACK> type; };

template <int STAGE, bool BACK> struct Panel {
    using P = Product<STAGE, BACK>;
    using S = Spread<STAGE, BACK>;
    using Sums = typename SumsOf<TENSOR_CORES, STAGE, BACK>::type;
    static constexpr int J = S::quads;
    static constexpr bool looped = layers_of<STAGE> > 1;  // then layers are told apart at run time, and none is in registers
    Quad kept[larger(1, S::items_per_warp * S::kept * J)];
    float bias[looped ? 1 : S::items_per_warp * J];
    const float* biases;   // [REPEAT, padded_outputs] of layers that share their code
    const Staying* shared;  // [units, sets, J, lanes]
    // DIRECT sweeps read some of these weights before the barrier that a product's inputs wait for, so that so many units have
    // theirs in registers when it begins, and some of the inputs right after it: before they come, there is time to store what
    // the layer before has left. At most so many quads of each, but for one unit of the inputs.
    static constexpr int READ_EARLY = DIRECT && S::items_per_warp == 1 && S::streamed == 0 ? 8 : 0;
    static_assert(!(DIRECT && S::streamed) || (looped && Stream<BACK>::HOLDS && S::items == WARPS));
    static constexpr int early = smaller(S::units_per_item - S::kept, READ_EARLY / J), in_registers = S::kept + early;
    static constexpr int at_once = smaller(larger(1, in_registers), larger(1, READ_EARLY / S::rows));  // units of inputs
    static constexpr bool reads_early = READ_EARLY && in_registers > 0;
    Staying prepared[larger(1, early * J)];  // as they came: to unpack them would wait for them
    Quad first[reads_early ? at_once * S::rows : 1];

    // What a lane fetches of a matrix at once: RUN inputs that follow one another, of one output or, for a tile of the tensor
    // cores, of two; as many quads are made of them. It is fetched without branches, which would wait for the memory, and
    // stays as it came until all of it is on its way.
    static constexpr int IN_WORD = 4 / int(sizeof(Input)), RUN = 4 * IN_WORD, RUNS = TENSOR_CORES ? 2 : 1;
    static constexpr int IN_VECTOR = smaller(RUN, 16 / int(sizeof(Weight)));  // numbers that one load brings
    struct Fetched { Weight runs[RUNS][RUN]; };

    DEVICE static Fetched fetched(const Weight* matrix, int rank, int unit, int group, int j, int lane) {
        const int k = unit * S::unit + (TENSOR_CORES ? lane % 4 * RUN : DIRECT ? lane / SIDE_BY_SIDE * RUN : 0);
        Fetched all;
#pragma unroll
        for (int r = 0; r < RUNS; ++r)
            fetch_run(all.runs[r], matrix, rank, k,
                      TENSOR_CORES ? group * S::outputs + j * 16 + r * 8 + lane / 4 : S::output(group, j, lane));
        return all;
    }
    // The weights from inputs k, k + 1, ... to the block's output n, zero where there is none.
    DEVICE static void fetch_run(Weight* to, const Weight* matrix, int rank, int k, int n) {
        const int feature = rank * P::own + n % P::own;
        const bool exists = n < P::out && feature < (BACK ? inputs(STAGE) : features(STAGE));
        if constexpr (!BACK) {
            constexpr int at_once = largest_divisor(P::in, IN_VECTOR);  // a matrix begins at a multiple of 16 bytes
            const Weight* from = matrix + unsigned((n / P::own * features(STAGE) + feature) * P::in + k);
#pragma unroll
            for (int c = 0; c < RUN; c += at_once) load_or_zero<at_once>(exists && k + c < P::in, to + c, from + c);
        } else {
            constexpr int apart = all_slices(features(STAGE));  // gates
            int gate = k / apart, place = k % apart;
            const Weight* from = matrix + unsigned((gate * features(STAGE) + place) * inputs(STAGE) + feature);
#pragma unroll
            for (int c = 0; c < RUN; ++c) {
                load_or_zero<1>(exists && gate < gates(STAGE) && place < features(STAGE), to + c, from + c * inputs(STAGE));
                if (++place == apart && apart % RUN) place = 0, ++gate;  // FMA alone: nothing is between gates
            }
        }
    }
    DEVICE static void quads(const Fetched& from, Quad* to, int apart) {
        const auto word = [&](int run, int k) {  // as many inputs as it holds
            const Weight* at = from.runs[run] + k * IN_WORD;
            return float_of(in_one_word(as_weight(to_float(at[0])), as_weight(to_float(at[IN_WORD - 1]))));
        };
        if constexpr (TENSOR_CORES) {
            to[0] = {word(0, 0), word(1, 0), word(0, 1), word(1, 1)};
            to[apart] = {word(0, 2), word(1, 2), word(0, 3), word(1, 3)};
        } else {
            to[0] = {word(0, 0), word(0, 1), word(0, 2), word(0, 3)};
        }
    }
    template <class T> DEVICE static void quads(const Fetched& from, PackedQuad<T>* to, int) {
        T numbers[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) round_to(numbers[k], to_float(from.runs[0][k]));
        *to = {in_one_word(numbers[0], numbers[1]), in_one_word(numbers[2], numbers[3])};
    }
    // Puts the units that stay in shared memory, counted through all layers, in the order in which warps read them; several
    // loads at once are on their way.
    DEVICE static const Staying* fill_shared(const Arguments& a, int run, int rank, Staying*& memory) {
        constexpr int of_unit = S::quads_of_unit / RUNS, of_item = J / RUNS * S::lanes, size = S::shared * of_unit;
        constexpr int at_once = 4 / RUNS;
        Staying* to = memory;
        for (int begin = thread_index(); begin < size; begin += at_once * THREADS) {
            Fetched all[at_once];
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                const int i = smaller(begin + k * THREADS, size - 1), unit = S::kept + i / of_unit;
                const int item = i % of_unit / of_item, layer = layer_on_chip<STAGE, BACK>(unit / S::units_per_item);
                all[k] = fetched(matrix(a, run, layer), rank,
                                 item / S::groups * S::units_per_item + unit % S::units_per_item, item % S::groups,
                                 i % of_item / S::lanes, i % S::lanes);
            }
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                const int i = begin + k * THREADS;
                if (i < size) quads(all[k], to + i / S::lanes * RUNS * S::lanes + i % S::lanes, S::lanes);
            }
        }
        memory += S::shared * S::quads_of_unit;
        return to;
    }
    // Writes this warp's slots of all other units, in the order in which it takes them; returns where they end. Blocks of one
    // rank write the same to the same place.
    DEVICE static Quad* fill_stream(const Arguments& a, int run, int rank, Quad* to) {
        constexpr int rows = ceil_div(J / RUNS * S::lanes, 32), in_slot = units_of_slot<STAGE, BACK>;
        const int lane = thread_index() % 32;
        for (int k = 0; k < (S::streamed ? layers_of<STAGE> : 0); ++k) {
            const int layer = BACK ? layers_of<STAGE> - 1 - k : k, first = units_on_chip<STAGE, BACK>(layer);
            for (int item = thread_index() / 32; item < S::items; item += WARPS) {
                for (int unit = first; unit < S::units_per_item; ++unit) {
                    Quad* slot = to + (unit - first) / in_slot * (slots_of_unit<STAGE, BACK> * Stream<BACK>::QUADS) +
                                 (unit - first) % in_slot * (S::rows_of_unit * 32) + lane;
                    Fetched all[rows];
#pragma unroll
                    for (int r = 0; r < rows; ++r) {
                        const int i = smaller(r * 32 + lane, J / RUNS * S::lanes - 1);
                        const int slice = DIRECT ? 0 : item / S::groups;
                        all[r] = fetched(matrix(a, run, layer), rank, slice * S::units_per_item + unit, item % S::groups,
                                         i / S::lanes, i % S::lanes);
                    }
#pragma unroll
                    for (int r = 0; r < rows; ++r) quads(all[r], slot + r * RUNS * 32, 32);
                }
                to += slots_of_layer<STAGE, BACK>(layer) * Stream<BACK>::QUADS;
            }
        }
        return to;
    }
    DEVICE static const Weight* matrix(const Arguments& a, int run, int layer) {
        return a.weight[layers_before(STAGE) + layer] + int64(run) * (gates(STAGE) * features(STAGE) * inputs(STAGE));
    }
    DEVICE static float bias_of(const Arguments& a, int run, int layer, int rank, int n) {
        const Weight* all = a.bias[layers_before(STAGE) + layer];
        const int feature = rank * P::own + n % P::own;
        const bool exists = !BACK && all && n < P::out && feature < features(STAGE);
        Weight bias;
        load_or_zero<1>(exists, &bias, all + (int64(run) * gates(STAGE) + n / P::own) * features(STAGE) + feature);
        return to_float(bias);
    }

    // Brings weights to where they stay: `pool` is what is left of the shared memory, `spare` is room for biases.
    DEVICE void load(const Arguments& a, int run, int rank, float*& spare, Staying*& pool) {
        const int lane = thread_index() % S::lanes, warp = thread_index() / 32;
        shared = fill_shared(a, run, rank, pool);
        if constexpr (looped) {
            biases = spare;
            constexpr int count = BACK ? 0 : layers_of<STAGE> * S::padded_outputs;
            for (int i = thread_index(); i < count; i += THREADS)
                spare[i] = bias_of(a, run, i / S::padded_outputs, rank, i % S::padded_outputs);
            spare += count;
        } else {
#pragma unroll
            for (int i = 0; i < S::items_per_warp; ++i) {
                const int item = warp + i * WARPS, slice = DIRECT ? 0 : item / S::groups, group = item % S::groups;
                const bool begins = DIRECT ? lane < SIDE_BY_SIDE : slice == 0;
#pragma unroll
                for (int k = 0; k < S::kept * J; k += RUNS)
                    quads(fetched(matrix(a, run, 0), rank, slice * S::units_per_item + k / J, group, k % J / RUNS, lane),
                          kept + i * S::kept * J + k, 1);
#pragma unroll
                for (int j = 0; j < J; ++j)
                    bias[i * J + j] = bias_of(a, run, 0, rank, begins ? Sums::output(group, j) : P::out);
            }
        }
    }

    DEVICE void multiply(int layer, const Input* rows, float* sums, Stream<BACK>& stream) const {
#pragma unroll
        for (int i = 0; i < S::items_per_warp; ++i) {
            const int item = thread_index() / 32 + i * WARPS, slice = item / S::groups, group = item % S::groups;
            if (S::items % WARPS && item >= S::items) break;
            float initial[J];
#pragma unroll
            for (int j = 0; j < J; ++j) {
                if (!looped) initial[j] = bias[i * J + j];
                else initial[j] = BACK || slice ? 0.f : biases[layer * S::padded_outputs + Sums::output(group, j)];
            }
            Sums sum(rows, slice, initial);
#pragma unroll
            for (int q = 0; q < S::kept; ++q) sum.add(kept + (i * S::kept + q) * J, q);
            const int here = S::streamed ? units_on_chip<STAGE, BACK>(layer) : S::units_per_item;
            const int lane = thread_index() % S::lanes;
            const Staying* from = shared + (layer * S::units_per_item * S::items + item) * (J * S::lanes) + lane;
            Quad w[J];
#pragma unroll 4
            for (int q = S::kept; q < here; ++q) {
#pragma unroll
                for (int j = 0; j < J; ++j) w[j] = unpacked(from[((q - S::kept) * S::items * J + j) * S::lanes]);
                sum.add(w, q);
            }
            if constexpr (S::streamed > 0) {
                constexpr int in_slot = units_of_slot<STAGE, BACK>, taken = slots_of_unit<STAGE, BACK>;
#pragma unroll(Stream<BACK>::RING ? 1 : 4)
                for (int begin = here; begin < S::units_per_item; begin += in_slot) {
                    const Quad* arrived[taken];
#pragma unroll
                    for (int k = 0; k < taken; ++k) arrived[k] = stream.arrived(k) + lane;
#pragma unroll
                    for (int u = 0; u < in_slot; ++u) {
                        if (u > 0 && begin + u >= S::units_per_item) break;
#pragma unroll
                        for (int j = 0; j < J; ++j) {
                            const int quad = u * S::rows_of_unit * 32 + j * S::lanes;
                            if constexpr (Stream<BACK>::HOLDS) w[j] = stream.held[quad / 32];
                            else w[j] = stream.read(arrived[quad / Stream<BACK>::QUADS] + quad % Stream<BACK>::QUADS);
                        }
                        sum.add(w, begin + u);
                    }
                    stream.template release<taken>();
                }
            }
            sum.store(sums, slice, group);
        }
    }

    // The same where inputs come STRAIGHT: weights are there before them, and sums are stored when everybody has finished
    // with those of the layer before.
    DEVICE void multiply_straight(int layer, const Input* rows, float* sums, Stream<BACK>& stream) const {
        constexpr int units = S::units_per_item, tiles = Sums::TILES;
        constexpr int at_once = smaller(units, larger(1, STRAIGHT_WORDS / larger(tiles, J)));
        constexpr int in_slot = units_of_slot<STAGE, BACK>, taken = slots_of_unit<STAGE, BACK>;
        static_assert(!S::streamed || !AHEAD[BACK] || (1 + (at_once + in_slot - 2) / in_slot) * taken <= AHEAD[BACK]);
        const int slice = thread_index() / 32, lane = thread_index() % 32;
        const bool busy = S::items == WARPS || slice < S::items;
        const int here = S::streamed ? units_on_chip<STAGE, BACK>(layer) : units;
        const Staying* from = shared + (layer * units * S::items + slice) * (J * S::lanes) + lane;
        int used = 0, released = 0;  // slots, each with all units that it has
        const auto weights = [&](Quad* w, int q) {  // of unit q
            if (q < S::kept || S::streamed == 0 || q < here) {
#pragma unroll
                for (int j = 0; j < J; ++j)
                    w[j] = q < S::kept ? kept[q * J + j] : unpacked(from[((q - S::kept) * S::items * J + j) * S::lanes]);
                return;
            }
            const int slot = ((q - here) / in_slot - released) * taken, row = (q - here) % in_slot * S::rows_of_unit;
            const Quad* arrived[taken];
#pragma unroll
            for (int k = 0; k < taken; ++k) arrived[k] = stream.arrived(slot + k) + row * 32 + lane;
#pragma unroll
            for (int j = 0; j < J; ++j) w[j] = stream.read(arrived[j / SLOT[BACK]] + j % SLOT[BACK] * 32);
        };
        float initial[J];
#pragma unroll
        for (int j = 0; j < J; ++j) {
            if (!looped) initial[j] = bias[j];
            else initial[j] = BACK || slice ? 0.f : biases[layer * S::padded_outputs + Sums::output(0, j)];
        }
        Sums sum(rows, slice, initial);
#pragma unroll
        for (int begin = 0; begin < units; begin += at_once) {
            if (!busy) break;
#pragma unroll 1
            for (; released < used; ++released) stream.template release<taken>();
            Quad w[at_once * J];
#pragma unroll
            for (int u = 0; u < at_once; ++u)
                if (begin + u < units) weights(w + u * J, begin + u);
            Words b[at_once * tiles];
            sum.template receive<at_once>(b, slice, begin);
#pragma unroll
            for (int u = 0; u < at_once; ++u) {
                const int q = begin + u;
                if (q >= units) break;
                sum.add(w + u * J, b + u * tiles);
                used += S::streamed && q >= here && ((q - here) % in_slot == in_slot - 1 || q == units - 1);
            }
        }
        block_barrier();
        if (busy) sum.store(sums, slice, 0);
        stream.owed = (used - released) * taken;
    }

    // The same where sums are finished DIRECTly, in three parts: before the barrier, after it, and when inputs have come.
    DEVICE static int first_item() {  // of a warp; without one of its own it takes another's, for nobody, and no branch
        return smaller(thread_index() / 32, S::items - 1);
    }
    DEVICE static int part_of(int item) { return S::items == S::groups ? 0 : item / S::groups; }
    DEVICE static int group_of(int item) { return S::items == S::groups ? item : item % S::groups; }
    DEVICE Staying in_shared(int layer, int unit, int group, int j) const {  // of this lane
        const int set = (on_chip_before<STAGE, BACK>(layer) * S::units_per_item + unit - S::kept) * S::sets + group;
        return shared[set * (J * S::lanes) + j * S::lanes + thread_index() % S::lanes];
    }
    DEVICE void prepare(int layer) {
#pragma unroll
        for (int k = 0; k < early * J; ++k)
            prepared[k] = in_shared(layer, S::kept + k / J, group_of(first_item()), k % J);
    }
    DEVICE float bias_in_shared(int layer, int n) const {  // of one of the lanes that share an output
        const bool begins = thread_index() % 32 < SIDE_BY_SIDE && n < P::out;
        return begins ? biases[layer * S::padded_outputs + n] : 0.f;
    }
    DEVICE void read(const Input* rows) {
        if constexpr (reads_early) {
            const float none[J] = {};
            const Sums sum(rows, part_of(first_item()), none);
#pragma unroll
            for (int q = 0; q < at_once; ++q) sum.read(first + q * S::rows, q);
        }
    }
    DEVICE void multiply_directly(int layer, const Input* rows, float* own, Stream<BACK>& stream) const {
#pragma unroll
        for (int i = 0; i < S::items_per_warp; ++i) {
            const int item = i == 0 ? first_item() : thread_index() / 32 + i * WARPS, group = group_of(item);
            if (i > 0 && S::items % WARPS && item >= S::items) break;
            float initial[J];
#pragma unroll
            for (int j = 0; j < J; ++j) {
                if (!looped) initial[j] = bias[i * J + j];
                else initial[j] = BACK ? 0.f : bias_in_shared(layer, Sums::output(group, j));
            }
            Sums sum(rows, part_of(item), initial);
#pragma unroll
            for (int begin = 0; begin < in_registers; begin += at_once) {
                const bool are_here = reads_early && begin == 0;
                Quad read_now[at_once * S::rows];
#pragma unroll
                for (int q = begin; !are_here && q < smaller(begin + at_once, in_registers); ++q)
                    sum.read(read_now + (q - begin) * S::rows, q);
#pragma unroll
                for (int q = begin; q < smaller(begin + at_once, in_registers); ++q) {
                    Quad w[J];
#pragma unroll
                    for (int j = 0; j < J; ++j)
                        w[j] = q < S::kept ? kept[(i * S::kept + q) * J + j] : unpacked(prepared[(q - S::kept) * J + j]);
                    sum.add(w, (are_here ? first : read_now) + (q - begin) * S::rows);
                }
            }
            if (S::streamed && units_on_chip<STAGE, BACK>(layer) == 0) {
#pragma unroll
                for (int q = 0; q < (S::streamed ? S::units_per_item : 0); ++q) sum.add(stream.held + q * J, q);
                stream.template release<1>();
            } else {
#pragma unroll(S::units_per_item <= 8 ? 8 : 4)
                for (int q = in_registers; q < S::units_per_item; ++q) {
                    Quad w[J];
#pragma unroll
                    for (int j = 0; j < J; ++j) w[j] = unpacked(in_shared(layer, q, group, j));
                    sum.add(w, q);
                }
            }
            sum.finish(own + i * (elements_of_item(S::width) * S::gates_of));
        }
    }

    // Of COUNT slices from FIRST on, in pairs: a step waits for this chain of additions.
    template <int FIRST = 0, int COUNT = S::slices> DEVICE static float total(const float* sums, int row, int n) {
        if constexpr (COUNT == 1) return sums[(FIRST * ROWS + row) * S::sum_stride + n];
        else return total<FIRST, COUNT / 2>(sums, row, n) + total<FIRST + COUNT / 2, COUNT - COUNT / 2>(sums, row, n);
    }
};

template <bool BACK, int STAGE = 0> struct Panels {
    Panel<STAGE, BACK> panel;
    Panels<BACK, STAGE + 1> deeper;
    DEVICE void load(const Arguments& a, int run, int rank, float* spare, Staying*& pool) {
        panel.load(a, run, rank, spare, pool);
        deeper.load(a, run, rank, spare, pool);
    }
    DEVICE Quad* fill_stream(const Arguments& a, int run, int rank, Quad* to) const {  // in the order of the sweep
        if (!BACK) to = panel.fill_stream(a, run, rank, to);
        to = deeper.fill_stream(a, run, rank, to);
        return BACK ? panel.fill_stream(a, run, rank, to) : to;
    }
    template <int WANTED> DEVICE auto& get() {
        if constexpr (WANTED == STAGE) return panel;
        else return deeper.template get<WANTED>();
    }
};
template <bool BACK> struct Panels<BACK, STAGES> {
    DEVICE void load(const Arguments&, int, int, float*, Staying*&) {}
    DEVICE Quad* fill_stream(const Arguments&, int, int, Quad* to) const { return to; }
};
