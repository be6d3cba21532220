// What a compiled kernel is for: its constants, and where things lie. `plan.py` chooses all of it.
//
//   CELL          0 dmu, 1 rhn, 2 rnn, 3 gru, 4 lstm
//   ACTIVATION    0 leaky_relu, 1 relu, 2 tanh, 3 silu, 4 gelu: of a dmu's hidden layers or an rnn's state
//   VALUE, WEIGHT 0 float32, 1 bfloat16, 2 float16: of values, and of weights and biases
//   PRODUCT       0 exact float32 multiplications, 1 tensor cores (bfloat16, float16, or TF32 for float32), 2 float32 that is
//                 split for the tensor cores: three products in TF32
//   D             features of the state
//   LAYERS        linear layers of a step
//   STAGES        runs of layers of one shape, which share their code; the first layer is a stage of its own, and so may all be
//   WIDTHS        output features of each stage's layers, not counting gates
//   REPEATS       layers of each stage
//   ROWS          sequences of a cluster
//   CLUSTER, WARPS, SAVE
//   TEAM          whether the blocks of a cluster are a team: any number of them, that exchange through global memory
//   DIRECT        0: sums go through shared memory, where other threads finish them. Otherwise the warps of a single block have
//                 whole sums of what their own lanes finish, and so many lanes share the inputs of an output (exact
//                 multiplications; in global memory, weights of layers that share their code alone)
//   RESIDUAL      whether hidden layers of a dmu, from the second on, add to the one before
//   HIDDEN_MASK, STATE_MASK, RESETS   whether sequences have masks of a dmu's hidden layers, of the state, and resets
// and for each stage, of the forward sweep and of the backward one:
//   GROUPS_*      how many groups of a warp's lanes share the rows (exact multiplications)
//   OUTPUTS_*     outputs of a lane (exact multiplications), or tiles of 16 outputs of a warp (tensor cores), at once
//   UNITS_*       units of inputs of which one warp takes a slice; a unit is what one Quad of weights is multiplied with
//   KEPT_*, SHARED_*   of these units, of all layers of the stage, how many have their weights in registers, and how many
//                 in shared memory; those of the rest are read from global memory at every step
// and for each sweep:
//   AHEAD_*, SLOT_*   how many slots of that rest a warp fetches before it needs them, and rows of 32 quads of a slot
//   STRAIGHT_*    whether the inputs of a team come straight from global memory to the registers of the warps that multiply
//                 them (tensor cores): a warp has one slice of them at most, and all outputs of the block

enum { DMU, RHN, RNN, GRU, LSTM };
enum { LEAKY_RELU, RELU, TANH, SILU, GELU };

constexpr int THREADS = WARPS * 32;
constexpr int WIDTH[] = {WIDTHS};
constexpr int REPEAT[] = {REPEATS};
template <int STAGE> constexpr int layers_of = REPEAT[STAGE];
constexpr int ROW_GROUPS[2][STAGES] = {{GROUPS_FORWARD}, {GROUPS_BACKWARD}};
constexpr int OUTPUTS_AT_ONCE[2][STAGES] = {{OUTPUTS_FORWARD}, {OUTPUTS_BACKWARD}};
constexpr int UNITS[2][STAGES] = {{UNITS_FORWARD}, {UNITS_BACKWARD}};
constexpr int KEPT[2][STAGES] = {{KEPT_FORWARD}, {KEPT_BACKWARD}};
constexpr int SHARED[2][STAGES] = {{SHARED_FORWARD}, {SHARED_BACKWARD}};
constexpr int AHEAD[2] = {AHEAD_FORWARD, AHEAD_BACKWARD};
constexpr int SLOT[2] = {SLOT_FORWARD, SLOT_BACKWARD};
constexpr bool STRAIGHT[2] = {STRAIGHT_FORWARD, STRAIGHT_BACKWARD};
constexpr int STRAIGHT_WORDS = 8;  // of 16 bytes, of weights and of inputs, that a lane of such a warp has at once
static_assert(!(STRAIGHT[0] || STRAIGHT[1]) || (TEAM && TENSOR_CORES));

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int largest_divisor(int a, int power_of_two) {  // that is a power of two and not above
    return a % power_of_two ? largest_divisor(a, power_of_two / 2) : power_of_two;
}

constexpr int inputs(int s) { return s == 0 ? D : WIDTH[s - 1]; }
constexpr int features(int s) { return WIDTH[s]; }
constexpr int gates(int s) {
    return CELL == DMU ? (s == STAGES - 1 ? 2 : 1) : CELL == RHN ? 2 : CELL == RNN ? 1 : CELL == GRU ? 3 : 4;
}
constexpr bool is_hidden(int s) { return CELL == DMU && s < STAGES - 1; }  // not what makes the state
// Features that a block owns; what blocks send one another goes in 16 bytes.
constexpr int SENT_TOGETHER = 16 / int(sizeof(Input));
constexpr int slice(int f) {
    return CLUSTER == 1 && !TENSOR_CORES ? f : round_up(ceil_div(f, CLUSTER), SENT_TOGETHER);
}
constexpr int all_slices(int f) { return CLUSTER * slice(f); }

// Who finishes what: anybody anything, or (DIRECT) a warp what it has summed. It takes items, which are a group of features
// with all gates and a part of the rows. `spread.py` counts the same.
static_assert(!DIRECT || (CLUSTER == 1 && !TENSOR_CORES));
constexpr int SHARING = larger(1, DIRECT), SIDE_BY_SIDE = 32 / SHARING;  // lanes with the same features, and features in lanes
constexpr int MOST_FEATURES_OF_LANE = 4;
constexpr int features_of_lane(int f) { return smaller(ceil_div(f, SIDE_BY_SIDE * WARPS), MOST_FEATURES_OF_LANE); }
constexpr int feature_groups(int f) { return ceil_div(f, SIDE_BY_SIDE * features_of_lane(f)); }
constexpr int row_parts(int f) {  // so that all warps have something to do
    int parts = 1;
    for (int n = 2; n <= ROWS; ++n)
        if (ROWS % n == 0 && feature_groups(f) * n <= WARPS) parts = n;
    return parts;
}
constexpr int rows_of_item(int f) { return ROWS / row_parts(f); }
constexpr int items_of_warp(int f) { return ceil_div(feature_groups(f) * row_parts(f), WARPS); }
// Sums of an item, all gates of an element counted as one, that the lanes with the same outputs divide among themselves. They
// halve them until each has one: then some have none.
constexpr int divided(int f) {
    const int all = features_of_lane(f) * rows_of_item(f);
    if (all >= SHARING) return round_up(all, SHARING);
    int power = 1;
    while (power < all) power *= 2;
    return power;
}
constexpr int elements_of_item(int f) { return larger(1, divided(f) / SHARING); }
constexpr int elements(int f) {  // that a thread finishes
    return DIRECT ? items_of_warp(f) * elements_of_item(f) : ceil_div(ROWS * slice(f), THREADS);
}
struct Element { int row, feature; bool there; };  // there: a thread has it; its feature may be padding, unless DIRECT
template <int F> DEVICE Element element(int e, int rank) {
    if constexpr (!DIRECT) {
        const int i = thread_index() + e * THREADS;
        return {i / slice(F), rank * slice(F) + i % slice(F), i < ROWS * slice(F)};
    } else {
        constexpr int each = elements_of_item(F), groups = feature_groups(F), items = groups * row_parts(F);
        constexpr int of_lane = features_of_lane(F), all = of_lane * rows_of_item(F), idle = larger(1, SHARING / divided(F));
        const int lane = thread_index() % 32, item = thread_index() / 32 + e / each * WARPS;
        const int share = lane / SIDE_BY_SIDE, m = share / idle * each + e % each;
        const int feature = (item % groups * of_lane + m % of_lane) * SIDE_BY_SIDE + lane % SIDE_BY_SIDE;
        const bool busy = (items % WARPS == 0 || item < items) && share % idle == 0 && m < all;
        return {item / groups * rows_of_item(F) + m / of_lane, feature,
                busy && (F % (SIDE_BY_SIDE * of_lane) == 0 || feature < F)};
    }
}
constexpr int elements_before(int s) { return s <= 0 ? 0 : elements_before(s - 1) + elements(WIDTH[s - 1]); }
constexpr int OWN = elements(D);

// Places in a step of the trace and of the deltas; hoisted.py gives their order.
constexpr bool SLOPES = CELL == DMU && (ACTIVATION == SILU || ACTIVATION == GELU || RESIDUAL || HIDDEN_MASK);
constexpr int layers_before(int s) { return s == 0 ? 0 : layers_before(s - 1) + REPEAT[s - 1]; }
constexpr int widths_before(int s) { return s == 0 ? 0 : widths_before(s - 1) + REPEAT[s - 1] * WIDTH[s - 1]; }
constexpr int HIDDEN = CELL == DMU ? widths_before(STAGES - 1) : 0;
constexpr int AFTER_HIDDEN = SLOPES ? 2 * HIDDEN : HIDDEN;
constexpr int TRACE = CELL == DMU ? AFTER_HIDDEN + 2 * D
                    : CELL == RHN ? 2 * D * LAYERS + D * (LAYERS - 1)
                    : CELL == GRU ? 4 * D : CELL == LSTM ? 5 * D : 0;
constexpr int outputs_before(int s) {
    return s == 0 ? 0 : outputs_before(s - 1) + REPEAT[s - 1] * gates(s - 1) * features(s - 1);
}
constexpr int DELTAS = outputs_before(STAGES) + (CELL == GRU ? D : 0);

struct Arguments {               // every field has 8 bytes: the host sends a row of int64
    const Weight* weight[LAYERS];  // [R, gates * features, inputs]
    const Weight* bias[LAYERS];    // [R, gates * features] or null
    Quad* streamed;                // [R, CLUSTER, WARPS, slots, quads] for weights that find no room on the chip
    Words* exchanged;              // [R, teams, TEAM_BUFFERS, ROWS, words] of a team, all POISON before a sweep
    const Value* projected;        // [R, T, B, gates * features] of layer 0
    const Value* h0;               // [R, B, D] or null: zeros
    const Value* c0;
    const int64* lengths;          // [R, B] or null
    const unsigned char* resets;   // [R, T, B] or null: whether the state is zero before a step
    const Value* state_mask;       // [R, B, D] or null
    const Value* hidden_mask;      // [R, B, HIDDEN] or null
    Value* y;                      // [R, T, B, D]
    Value* h_n;                    // [R, B, D]; going back the gradient of h_n comes in here, or null
    Value* c_n;
    Value* trace;                  // [R, T, B, TRACE]
    Value* deltas;                 // [R, T, B, DELTAS]
    Value* grad_h0;                // or null where nobody asks
    Value* grad_c0;
    const Value* grad_y;           // [R, T, B, D] with the strides below, or null
    int64 grad_y_run, grad_y_step, grad_y_row, grad_y_feature;
    int64 steps;
    int64 batch;
    int64 reverse;
};
