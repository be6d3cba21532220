// Weight gradients: a layer's products over time and batch, all of them or as many as a launch takes.

// A term is the gradient of one weight, or of some of its rows: the sum over (t, b) of deltas times what the weight
// saw.
enum { OF_X, OF_STATE, OF_TRACE, OF_ONES };  // OF_STATE: the state before the step; OF_ONES: a bias
struct Term {
    int64 left, lefts;            // features of the deltas
    int64 source, right, rights;  // and of what the weight saw
    int64 out, out_run;           // where its result begins, and how far runs are apart
    int64 bias, bias_run;         // the same for the sums of these deltas, if bias is not negative
    int64 tile;                   // the first of its tiles
};
constexpr int TERMS = smaller(2 * LAYERS + 4, 40);  // arguments of a kernel have 4 KB
struct Products {          // as Arguments, a row of int64
    const Value* deltas;   // [R, T, B, DELTAS]
    const Value* x;        // [R, T, B, inputs] with the strides below
    const Value* h0;       // [R, B, D] or null: zeros
    const Value* y;        // [R, T, B, D]
    const Value* trace;    // [R, T, B, TRACE]
    const int64* lengths;  // [R, B] or null
    const unsigned char* resets;  // [R, T, B] or null
    const Value* state_mask;  // [R, B, D] or null
    float* out;            // [pieces, total]
    int64 x_run, x_step, x_row;
    int64 steps, batch, reverse;
    int64 share;  // rows of a piece
    int64 tile;   // LARGE_TILE or SMALL_TILE
    int64 tiles, total;
    int64 terms;
    Term term[TERMS];
};
// A block makes TILE x TILE outputs. A thread fetches columns of a tile, so small layers have small ones. Large layers have the
// choice: over few rows, many small tiles keep more of a GPU busy.
constexpr int most_outputs(int s) { return s == STAGES ? 0 : larger(gates(s) * features(s), most_outputs(s + 1)); }
constexpr int LARGE_TILE = most_outputs(0) <= 8 ? 8 : most_outputs(0) <= 16 ? 16 : most_outputs(0) <= 32 ? 32 : 64;
constexpr int SMALL_TILE = smaller(LARGE_TILE, 32);
constexpr int PRODUCT_THREADS = 256;
constexpr int PRODUCT_BLOCKS = 2;  // of a multiprocessor at once: their registers suffice
constexpr int chunk_of(int tile) { return 2048 / tile; }  // rows in shared memory
constexpr int tile_stride(int tile) { return tile + 4; }  // neighbouring rows begin in different banks
constexpr int products_shared(int tile) { return 2 * chunk_of(tile) * tile_stride(tile); }  // floats

// a / b of numbers below 2^22, in a fifth of the instructions of a division.
DEVICE int quotient(int a, int b) {
    const int near = int(float(a) * reciprocal(float(b))), rest = a - near * b;
    return near + (rest >= b) - (rest < 0);
}

// One tile of one term, over one piece of the rows (t, b) of one run. A thread makes 4 x 4 outputs; where a tile is
// narrow the threads that are left over take other rows of the chunk.
template <int TILE> struct ProductTile {
    static constexpr int CHUNK = chunk_of(TILE), TILE_STRIDE = tile_stride(TILE);
    static constexpr int ROW_STEP = PRODUCT_THREADS / TILE, FETCHED = CHUNK / ROW_STEP;
    static_assert(17 * PRODUCT_THREADS <= products_shared(TILE), "the sums of all threads fit into the memory of a chunk");
    const Products& p;
    const int piece;
    const Term& term;
    const int run, batch;
    int left0, right0, lefts, rights;
    const bool of_state, is_masked;  // what the weight saw is a state, and seen through a mask
    // A thread fetches one column of either side, or of the last one that there is, in whose place nothing is kept in the end.
    // What it fetches stays as it came until it is needed, and it fetches without branches: both would wait for the memory,
    // once for every row. Beyond the last row it fetches zeros.
    const Value* delta;    // at the row that comes next
    const Value* from;     // what the weight saw there
    int64 apart, further;  // elements from there to the row ROW_STEP further, and where that is beyond the end of a step
    const Value* start;    // at b * start_row: the state before a sequence's first step
    const Value* mask;     // [B, D] through which weights see the state
    int start_row;
    const int first_time;        // at which sequences begin, if what the weight saw is a state; with lengths, some do later
    int next, end, t, b;         // the row that comes next, also as a time and a sequence
    const int times, sequences;  // that a step of ROW_STEP rows is
    Value next_left[FETCHED], next_right[FETCHED], next_mask[STATE_MASK ? FETCHED : 1];
    unsigned right_counts;            // bit k: whether row k of these does
    unsigned char next_cut[FETCHED];  // whether the state was lost: looked at when it has come, like the rest

    DEVICE static const Term& term_of(const Products& p, int tile) {
        int k = 0;
        while (k + 1 < p.terms && p.term[k + 1].tile <= tile) ++k;
        return p.term[k];
    }

    DEVICE ProductTile(const Products& p)
        : p(p), piece(quotient(block_x(), int(p.tiles))), term(term_of(p, block_x() - piece * int(p.tiles))), run(block_y()),
          batch(int(p.batch)),
          of_state(term.source == OF_STATE), is_masked(STATE_MASK && (of_state || (CELL == RHN && term.source == OF_TRACE))),
          first_time(!of_state ? -1 : p.reverse ? int(p.steps) - 1 : 0), times(ROW_STEP / batch), sequences(ROW_STEP % batch) {
        const int across = ceil_div(int(term.rights), TILE), tile = block_x() - piece * int(p.tiles) - int(term.tile);
        const int down = quotient(tile, across);
        left0 = down * TILE, right0 = (tile - down * across) * TILE;
        lefts = smaller(TILE, int(term.lefts) - left0), rights = smaller(TILE, int(term.rights) - right0);

        const int rows = int(p.steps) * batch, begin = piece * int(p.share);
        const bool zeros = of_state && p.steps == 1 && !p.h0 && term.bias < 0;  // a single step sees nothing else of the state
        next = begin + thread_index() / TILE, end = zeros ? begin : smaller(begin + int(p.share), rows);
        t = next / batch, b = next - t * batch;
        const int column = thread_index() % TILE;
        const int64 all = int64(run) * rows, right = right0 + smaller(column, rights - 1);
        delta = p.deltas + (all + next) * DELTAS + term.left + left0 + smaller(column, lefts - 1);
        start = p.h0 ? p.h0 + int64(run) * batch * D + right : zero(), start_row = p.h0 ? D : 0;
        mask = p.state_mask + int64(run) * batch * D + right;
        int64 step = 0, row = 0;
        if (term.source == OF_X) {
            from = p.x + run * p.x_run + right, step = p.x_step, row = p.x_row;
        } else if (of_state) {
            row = D, step = int64(batch) * D, from = p.y + all * D + right + (p.reverse ? step : -step);
        } else if (term.source == OF_TRACE) {
            row = TRACE, step = int64(batch) * TRACE, from = p.trace + all * TRACE + term.right + right;
        } else {
            from = one();
        }
        from += t * step + b * row;
        apart = times * step + sequences * row, further = apart + step - batch * row;
    }

    DEVICE void fetch() {
        // Where lengths decide: rows that do not count, since NaN in the padding of x must not get into a sum, and those
        // whose step is a sequence's first. Other padding has deltas of zero, and so has y.
        unsigned padding = 0, firsts = 0;
        if (p.lengths && (term.source == OF_X || (of_state && p.reverse))) {
#pragma unroll
            for (int k = 0; k < FETCHED; ++k) {
                const int row = next + k * ROW_STEP, t = row / batch, until = int(p.lengths[run * p.batch + row % batch]);
                if (term.source == OF_X) padding |= unsigned(t >= until) << k;
                else firsts |= unsigned(t + 1 >= until) << k;
            }
        }
        right_counts = ~padding;
#pragma unroll
        for (int k = 0; k < FETCHED; ++k) {
            const bool there = next + k * ROW_STEP < end, first = t == first_time || firsts >> k & 1;
            load_or_zero<1>(there, next_left + k, delta + k * ROW_STEP * DELTAS);
            load_or_zero<1>(there, next_right + k, first ? start + b * start_row : from);
            if (is_masked) next_mask[STATE_MASK ? k : 0] = mask[b * D];
            if (RESETS) next_cut[k] = of_state && there ? p.resets[run * p.steps * batch + next + k * ROW_STEP] : 0;
            b += sequences;
            const bool around = b >= batch;
            b -= around ? batch : 0, t += times + around, from += around ? further : apart;
        }
        delta += CHUNK * DELTAS, next += CHUNK;
    }
    DEVICE float right_at(int k) const {
        if (!(right_counts >> k & 1) || (RESETS && next_cut[k])) return 0.f;
        const float seen = to_float(next_right[k]);
        return is_masked ? seen * to_float(next_mask[STATE_MASK ? k : 0]) : seen;
    }

    DEVICE void run_all() {
        float* left = shared_memory;
        float* right = shared_memory + CHUNK * TILE_STRIDE;
        const int across = ceil_div(rights, 4), cells = ceil_div(lefts, 4) * across, groups = quotient(PRODUCT_THREADS, cells);
        const int group = quotient(thread_index(), cells), cell = thread_index() - group * cells;
        const int own = thread_index() / TILE * TILE_STRIDE + thread_index() % TILE, cell_row = quotient(cell, across);
        const float* l = left + cell_row * 4;
        const float* r = right + (cell - cell_row * across) * 4;
        float sum[16];
#pragma unroll
        for (int k = 0; k < 16; ++k) sum[k] = 0.f;
        float of_column = 0.f;  // of this thread's deltas
        int rows_left = end - (next - thread_index() / TILE);
        fetch();
        for (; rows_left > 0; rows_left -= CHUNK) {
#pragma unroll
            for (int k = 0; k < FETCHED; ++k) {
                const float fetched = to_float(next_left[k]);
                of_column += fetched, left[own + k * ROW_STEP * TILE_STRIDE] = fetched;
                right[own + k * ROW_STEP * TILE_STRIDE] = right_at(k);
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
        float* of_columns = shared_memory + 16 * PRODUCT_THREADS;  // [ROW_STEP, TILE]
        of_columns[thread_index()] = of_column;
        block_barrier();
        const int j = thread_index() % TILE;
        float* of_piece = p.out + piece * p.total;
        if (term.bias >= 0 && right0 == 0 && thread_index() < lefts) {
            float all = 0.f;
            for (int g = 0; g < ROW_STEP; ++g) all += of_columns[g * TILE + j];
            of_piece[run * term.bias_run + term.bias + left0 + j] = all;
        }
        float* out = of_piece + run * term.out_run + term.out + left0 * term.rights + right0 + j;
        for (int i = thread_index() / TILE; i < lefts && j < rights; i += ROW_STEP) {
            const float* of_cell = shared_memory + (i % 4 * 4 + j % 4) * PRODUCT_THREADS + i / 4 * across + j / 4;
            float all = 0.f;
            for (int g = 0; g < groups; ++g) all += of_cell[g * cells];
            out[i * term.rights] = all;
        }
    }
};
DEVICE void multiply_tiles(const Products& p) {
    if (SMALL_TILE < LARGE_TILE && p.tile == SMALL_TILE) ProductTile<SMALL_TILE>(p).run_all();
    else ProductTile<LARGE_TILE>(p).run_all();
}
