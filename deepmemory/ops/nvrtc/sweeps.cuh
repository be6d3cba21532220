// The two sweeps over time for one layer in one direction.
//
// A cluster of CLUSTER blocks takes ROWS sequences of one run through all time steps. Of every linear layer each
// block owns a slice of the output features, keeps the weights of that slice on the chip as far as they find room, and
// sends what it computed to the shared memory of the other blocks, or of a TEAM to global memory. One layer of one step is
//
//     partial sums -> block barrier -> add up, apply the gate, send, store -> receive
//
// where a warp multiplies a slice of the inputs with some outputs, and a thread finishes single elements. In a single block
// sums may also be finished DIRECTly by the warp that has them: sums -> apply the gate, send -> block barrier -> store. State
// and sums are float32 whatever the values' type. Batch size, length and direction are arguments.

constexpr int WORDS_AT_ONCE = WARPS > 8 ? 8 : 16;  // of 16 bytes, that a thread of a team has on their way to it

// Where a sweep is in a record [R, T, B, WIDTH]. It moves along with the steps, which would wait for address arithmetic.
template <class T, int WIDTH> struct Place {
    T* step = nullptr;  // of the block's first sequence
    DEVICE T* at(int row, int feature) const { return step + unsigned(row * WIDTH + feature); }
    DEVICE Place moved(int sequences) const { return {step + int64(sequences) * WIDTH}; }
};

template <bool BACK> struct Sweep {
    const Arguments& a;
    const int rank, run, steps, batch;
    const int later;  // sequences from a step to the next one of the sweep forward
    const int first;  // sequence
    const int rows;   // that are sequences of the batch
    float* const sums;
    const int flip;      // -1 going from the end to the start of sequences, else 0
    int* const limits;   // [ROWS] step s is real if s ^ flip is below
    int limit_of_lane;   // that of the row that has this lane's number
    unsigned real_rows;  // at this step; bit k is row k's, so that nobody waits for memory
    int begin, end;  // of what is not padding in every row; memory outside comes in as zero
    Panels<BACK> panels;
    static constexpr bool streams = streamed_slots<BACK>() > 0;
    Stream<BACK> stream;
    int exchange = 0;  // counts what was sent and received; its parity tells the buffer
    int filling = 0;   // where DIRECT sweeps have the buffer of this exchange: a step waits for its address
    float own_sums[most_own_sums<BACK>()];  // [element, gate] of this thread, where it finishes them DIRECTly

    DEVICE Sweep(const Arguments& a) : a(a), rank(block_x() % CLUSTER), run(block_y()), steps(int(a.steps)),
                                       batch(int(a.batch)), later(at_hand(a.reverse ? -batch : batch)),
                                       first(block_x() / CLUSTER * ROWS),
                                       rows(smaller(batch - first, ROWS)),
                                       sums(shared_memory + BARRIERS + rows_in_shared<BACK>()),
                                       flip(at_hand(a.reverse ? -1 : 0)),
                                       limits(reinterpret_cast<int*>(sums + sums_size<BACK>())) {
        for (int i = thread_index(); i < rows_in_shared<BACK>(); i += THREADS) shared_memory[BARRIERS + i] = 0.f;
        const int skipped = a.reverse ? steps : 0;
        for (int row = thread_index(); row < ROWS; row += THREADS)
            limits[row] = (!in_batch(row) ? 0 : a.lengths ? int(a.lengths[sequence(row)]) : steps) - skipped;
        float* spare = reinterpret_cast<float*>(limits + round_up(ROWS, 4));
        Staying* pool = reinterpret_cast<Staying*>(spare + round_up(biases_in_shared<BACK>(), 4));
        panels.load(a, run, rank, spare, pool);
        if constexpr (streams) {
            stream.place(pool, a.streamed + (int64(run) * CLUSTER + rank) * streamed_quads<BACK>());
            stream.slots = int(panels.fill_stream(a, run, rank, stream.far) - stream.far) / Stream<BACK>::QUADS;
            if (Stream<BACK>::RING) written_for_fetching();
        }
        if (CLUSTER == 1 || TEAM) {
            block_barrier();
        } else {
            open_exchange();
            cluster_barrier();
        }
        if constexpr (streams) stream.start();
        int longest = 0;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) longest = larger(longest, limits[row] + skipped);
        limit_of_lane = limits[smaller(thread_index() % 32, ROWS - 1)];
        begin = a.reverse ? steps - longest : 0;
        end = a.reverse ? steps : longest;
    }
    DEVICE Input* buffer(int which) const {  // of this exchange or of the one before
        constexpr int size = buffer_floats<BACK>();
        const int place = !DIRECT ? (which & (ROW_BUFFERS - 1)) * size : which == exchange ? filling : size - filling;
        return reinterpret_cast<Input*>(shared_memory + BARRIERS + place);
    }
    DEVICE Words* team_buffer(int which) const {
        const int team = run * ceil_div(batch, ROWS) + block_x() / CLUSTER;  // fewer than multiprocessors
        return a.exchanged + (team * TEAM_BUFFERS + (which & (TEAM_BUFFERS - 1))) * team_buffer_words<BACK>();
    }
    DEVICE bool in_batch(int row) const { return row < rows; }
    DEVICE int64 sequence(int row) const { return int64(run) * batch + first + row; }
    template <int WIDTH, class T> DEVICE Place<T, WIDTH> place(T* record, int s) const {  // also before and after all steps
        return {record + ((int64(run) * steps + time(s)) * batch + first) * WIDTH};
    }
    DEVICE static bool has(unsigned rows, int row) { return rows >> (DIRECT ? row & 31 : row) & 1; }  // or it does not exist
    DEVICE void begin_step(int s) { real_rows = in_lanes((s ^ flip) < limit_of_lane); }
    DEVICE bool is_real(int row) const { return has(real_rows, row); }
    DEVICE static int at_hand(int x) { return CLUSTER == 1 ? kept(x) : x; }  // blocks of a cluster are short of registers
    DEVICE int time(int s) const { return a.reverse ? steps - 1 - s : s; }
    // Whether the state is zero before step s in the row of this lane; `cut_rows`, which looks at it and waits for the
    // memory, tells it of all rows. Beyond the steps or the batch, anything that is there will do.
    DEVICE unsigned char fetch_reset(int s) const {
        if (!RESETS) return 0;
        return *place<1>(a.resets, larger(0, smaller(s, steps - 1))).at(smaller(thread_index() % 32, rows - 1), 0);
    }
    DEVICE unsigned cut_rows(unsigned char reset, int s) const {  // bit k is row k's
        return RESETS && s < end ? in_lanes(reset != 0) : 0;
    }
    DEVICE float state_mask(int any_row, int feature) const {
        return STATE_MASK ? to_float(a.state_mask[sequence(smaller(any_row, rows - 1)) * D + feature]) : 1.f;
    }

    // Calls visit(e, row, feature) for each element of `F` features that this thread finishes.
    template <int F, class Visit> DEVICE void for_own(Visit visit) const {
#pragma unroll
        for (int e = 0; e < elements(F); ++e) {
            if constexpr (DIRECT) {
                const Element at = element<F>(e, rank);
                if (at.there) visit(e, at.row, at.feature);
            } else {  // the same as `element`, with which ptxas spills more
                constexpr int own = slice(F);
                const int i = thread_index() + e * THREADS, row = i / own, feature = rank * own + i % own;
                if (i < ROWS * own && feature < F) visit(e, row, feature);
            }
        }
    }
    // The same for what stays in registers: DIRECT sweeps, which wait for every instruction, do it for elements that do not
    // exist too.
    template <int F, class Visit> DEVICE void for_registers(Visit visit) const {
        if constexpr (!DIRECT) for_own<F>(visit);
        else
#pragma unroll
            for (int e = 0; e < elements(F); ++e) {
                const Element at = element<F>(e, rank);
                visit(e, at.row, at.feature);
            }
    }
    // The same to fetch what these elements need, always of rows of the batch. A single block has short steps and does it for
    // elements that do not exist too, in the place of others: where a branch ends, what was fetched in it is waited for.
    template <int F, class Visit> DEVICE void for_fetched(Visit visit) const {
        if constexpr (CLUSTER > 1) {
            for_own<F>([&](int e, int row, int feature) { visit(e, smaller(row, rows - 1), feature); });
        } else {
#pragma unroll
            for (int e = 0; e < elements(F); ++e) {
                const Element at = element<F>(e, rank);
                visit(e, smaller(at.row, rows - 1), smaller(at.feature, F - 1));
            }
        }
    }
    // This thread's elements of a record [R, B, D], zeros where there is none. A single block, whose sweeps are short, has all of
    // them on their way at once.
    DEVICE void load_states(float* to, const Value* record) const {
        const auto place = [&](int row, int feature) { return record + sequence(row) * D + feature; };
        if constexpr (CLUSTER > 1) {
            for_own<D>([&](int e, int row, int feature) {
                to[e] = record && in_batch(row) ? to_float(*place(row, feature)) : 0.f;
            });
        } else {
            Value loaded[OWN];
#pragma unroll
            for (int e = 0; e < OWN; ++e) {
                const auto [row, feature, there] = element<D>(e, rank);
                load_or_zero<1>(record && there && feature < D && in_batch(row), loaded + e, place(row, feature));
            }
#pragma unroll
            for (int e = 0; e < OWN; ++e) to[e] = to_float(loaded[e]);
        }
    }
    // Gives every block of the cluster inputs of the next product: values[e * STEP] of each own element, `offset` further.
    // A team has them close together: [ROWS, G * all_slices(F)].
    template <int F, int STEP = 1, int G = 1> DEVICE void send(const float* values, int offset = 0) const {
#pragma unroll
        for (int e = 0; e < elements(F); ++e) {
            const auto [row, feature, there] = element<F>(e, rank);
            const Input value = as_input(DIRECT || (there && feature < F) ? values[e * STEP] : 0.f);
            if constexpr (TEAM) {
                Input* all = reinterpret_cast<Input*>(team_buffer(exchange));
                constexpr int apart = team_row<BACK>(G * all_slices(F)) * SENT_TOGETHER;
                send_to_team(all + row * apart + offset + feature, value, there);
            } else {
                Input* target = buffer(exchange) + row * row_stride<BACK>() + offset + feature;
                if (CLUSTER > 1) send_to_all<CLUSTER>(target, value, there, exchange);
                else if (there) *target = value;
            }
        }
    }
    // Waits for all inputs of the next product, which is that of a layer of stage NEXT in DIRECT sweeps. A block, or a DIRECT
    // warp, sends again only after it has received, so that a buffer that is written to has been read by everybody: two of
    // them suffice.
    template <int INPUTS, int NEXT> DEVICE void all_sent(int next_layer) {
        if constexpr (DIRECT) panels.template get<NEXT>().prepare(next_layer);
        constexpr int stale = RESETS && !STRAIGHT[BACK] ? stale_columns<BACK, INPUTS>() : 0;  // a reset makes an end of NaN
        if constexpr (stale > 0)
            for (int i = thread_index(); i < ROWS * stale; i += THREADS)
                round_to(buffer(exchange)[i / stale * row_stride<BACK>() + INPUTS + i % stale], 0.f);
        if constexpr (TEAM) {
            poison_old();
            if constexpr (!STRAIGHT[BACK]) receive_from_team<INPUTS>();
            else if constexpr (streams) stream.settle();
        } else if (CLUSTER > 1) {
            receive(ROWS * INPUTS * int(sizeof(Input)), exchange);
        }
        if (CLUSTER == 1 || (TEAM && !STRAIGHT[BACK]) || stale) block_barrier();
        ++exchange;
        if constexpr (DIRECT) {
            filling = buffer_floats<BACK>() - filling;
            panels.template get<NEXT>().read(buffer(exchange - 1));
        }
    }
    // The same for a DIRECT product whose inputs are there already: after layers that share their code another stage follows.
    template <int NEXT> DEVICE void begin_product() {
        panels.template get<NEXT>().prepare(0);
        panels.template get<NEXT>().read(buffer(exchange - 1));
    }
    // Whoever sends has received the exchange before, for which everybody had read the one before that: its words can be
    // poisoned. Every block takes a share of them, whoever wrote it.
    DEVICE void poison_old() const {
        constexpr int words = team_buffer_words<BACK>(), share = ceil_div(words, CLUSTER);
        Words* old = team_buffer(exchange + TEAM_BUFFERS - 2);
#pragma unroll 1
        for (int i = rank * share + thread_index(); i < smaller(rank * share + share, words); i += THREADS)
            store_for_team(old + i, {POISON, POISON, POISON, POISON});
        if (exchange % TEAM_FENCE == 0) gpu_fence();
    }
    // Brings all rows to shared memory.
    template <int INPUTS> DEVICE void receive_from_team() const {
        constexpr int in_row = INPUTS / SENT_TOGETHER, words = ROWS * in_row, stride = row_stride<BACK>() / SENT_TOGETHER;
        constexpr int at_once = smaller(ceil_div(words, THREADS), WORDS_AT_ONCE);
        const Words* from = team_buffer(exchange);
        Words* to = reinterpret_cast<Words*>(buffer(exchange));
        for (int begin = thread_index(); begin < words; begin += at_once * THREADS) {
            Words w[at_once];
            const auto is_sent = [&](int k) { return begin + k * THREADS < words; };
            receive_words<at_once, false>(w, is_sent, [&](int k) { return from + begin + k * THREADS; });
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                const int i = begin + k * THREADS;
                if (i < words) to[i / in_row * stride + i % in_row] = w[k];
            }
        }
    }
    template <int STAGE> DEVICE void multiply(int k) {  // with layer k of a stage
        if constexpr (DIRECT) {
            panels.template get<STAGE>().multiply_directly(k, buffer(exchange - 1), own_sums, stream);
        } else if constexpr (STRAIGHT[BACK]) {
            const Input* rows = reinterpret_cast<const Input*>(team_buffer(exchange - 1));
            panels.template get<STAGE>().multiply_straight(k, rows, sums, stream);
            block_barrier();
        } else {
            panels.template get<STAGE>().multiply(k, buffer(exchange - 1), sums, stream);
            block_barrier();
        }
    }
    template <int STAGE> DEVICE float total(int e, int gate, int row, int feature) const {
        constexpr int own = Product<STAGE, BACK>::own;
        if constexpr (DIRECT) return own_sums[e * Spread<STAGE, BACK>::gates_of + gate];
        else return Panel<STAGE, BACK>::total(sums, row, gate * own + feature - rank * own);
    }
};

struct Forward : Sweep<false> {
    float h[OWN], c[CELL == LSTM ? OWN : 1];
    Value x[elements(features(0)) * gates(0)];  // of the step to come, fetched one step early
    Place<const Value, gates(0) * features(0)> projected;  // of the step that is fetched next
    Place<Value, TRACE> trace;                             // of this step
    Place<Value, D> y;
    float mask[STATE_MASK ? OWN : 1];
    unsigned next_cut;  // rows whose state is lost after the step's last layer
    float skip[RESIDUAL ? elements(features(0)) : 1];  // the hidden layer before, which the next one adds to

    static constexpr int traced(int stage) {  // numbers of an element for the way back
        return is_hidden(stage) ? (SLOPES ? 2 : 1) : CELL == DMU || CELL == RHN ? 2 : CELL == GRU ? 4 : CELL == LSTM ? 5 : 0;
    }

    DEVICE Forward(const Arguments& a) : Sweep(a) {}

    DEVICE void fetch(int s) {
        for_fetched<features(0)>([&](int e, int row, int feature) {
            const Value* from = projected.at(row, feature);
#pragma unroll
            for (int g = 0; g < gates(0); ++g) x[e * gates(0) + g] = from[g * features(0)];
        });
        projected = projected.moved(s + 1 < steps ? later : 0);  // beyond the last step, anything that is there will do
    }

    template <int STAGE> DEVICE void layer(int s, int k) {  // layer k of a stage
        constexpr int F = features(STAGE), G = gates(STAGE), count = traced(STAGE);
        float saved[elements(F) * larger(1, count)];  // for the trace
        Value hidden_mask[HIDDEN_MASK && is_hidden(STAGE) ? elements(F) : 1];
        if constexpr (HIDDEN_MASK && is_hidden(STAGE))
            for_own<F>([&](int e, int any_row, int feature) {
                const int64 row = sequence(smaller(any_row, rows - 1));
                hidden_mask[e] = a.hidden_mask[row * HIDDEN + widths_before(STAGE) + k * F + feature];
            });
        const int layer = layers_before(STAGE) + k;
        // The layer before a step's last one finds out whether the state is lost before step `next`. It fetches that while
        // it has to wait anyway: blocks of a cluster for one another, a single block for its product.
        const bool last_follows = (layer + 1) % LAYERS == LAYERS - 1;
        const int next = layer + 1 < LAYERS ? s + 1 : s + 2;
        unsigned char reset = 0;
        if (last_follows && CLUSTER == 1) reset = fetch_reset(next);
        multiply<STAGE>(k);
        const unsigned cut = layer == LAYERS - 1 ? next_cut : 0;  // rows whose state is lost after this layer
        for_registers<F>([&](int e, int row, int feature) {
            const bool real = is_real(row);
            float before[G];  // what the gates see
#pragma unroll
            for (int g = 0; g < G; ++g) {
                before[g] = total<STAGE>(e, g, row, feature);
                if (STAGE == 0 && CELL != GRU) before[g] += to_float(x[e * G + g]);
            }
            float* keep = saved + e * count;
            if constexpr (is_hidden(STAGE)) {
                keep[0] = activate(before[0]);
                if (SLOPES) keep[SLOPES] = slope_at(before[0], keep[0]);
                if constexpr (HIDDEN_MASK) {
                    const float factor = to_float(hidden_mask[e]);
                    keep[0] *= factor, keep[SLOPES] *= factor;
                }
                if constexpr (RESIDUAL) {
                    if (STAGE > 0) keep[0] += skip[e];
                    skip[e] = keep[0];
                }
            } else {
                const float next = update(e, real, before, keep);
                h[e] = real ? next : h[e];
            }
        });
        if constexpr (is_hidden(STAGE)) send<F, count>(saved);
        else send_state(cut);
        // Not earlier: registers are short, and what is put on the stack has to have come.
        if constexpr (STAGE == 0) fetch(s + 1);
        if (last_follows && CLUSTER > 1) reset = fetch_reset(next);
        // The other warps wait for what was sent: they get it before memory does. Blocks of a cluster wait longer.
        if (CLUSTER > 1) store<STAGE>(k, saved);
        if constexpr (layers_of<STAGE> > 1) all_sent<all_slices(F), STAGE>(smaller(k + 1, layers_of<STAGE> - 1));
        else all_sent<all_slices(F), (STAGE + 1) % STAGES>(0);
        if (last_follows) next_cut = cut_rows(reset, next);
        if (CLUSTER == 1) store<STAGE>(k, saved);
        if constexpr (!is_hidden(STAGE)) forget(cut);
    }
    // What the weights see of the state: a mask may hide some of it, and where a reset comes next there is nothing.
    DEVICE void send_state(unsigned cut) {
        float seen[OWN];
        for_registers<D>([&](int e, int row, int) {
            seen[e] = RESETS && has(cut, row) ? 0.f : STATE_MASK ? h[e] * mask[STATE_MASK ? e : 0] : h[e];
        });
        send<D>(seen);
    }
    DEVICE void forget(unsigned cut) {
        for_registers<D>([&](int e, int row, int) {
            if (RESETS && has(cut, row)) h[e] = 0.f, c[CELL == LSTM ? e : 0] = 0.f;
        });
    }
    template <int STAGE> DEVICE void stages(int s) {
        if constexpr (layers_of<STAGE> == 1) layer<STAGE>(s, 0);
        else
#pragma unroll 1
            for (int k = 0; k < layers_of<STAGE>; ++k) layer<STAGE>(s, k);
        if constexpr (DIRECT && layers_of<STAGE> > 1) begin_product<(STAGE + 1) % STAGES>();
        if constexpr (STAGE + 1 < STAGES) stages<STAGE + 1>(s);
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
            const Value* of_x = x + e * 3;
            const Gate keep = gate(to_float(of_x[1]) + v[1]);
            saved[0] = sigmoid(to_float(of_x[0]) + v[0]), saved[1] = keep.open, saved[3] = v[2];
            saved[2] = tanh_of(to_float(of_x[2]) + saved[0] * v[2]);
            return h[e] * keep.open + saved[2] * keep.shut;
        } else {
            saved[0] = sigmoid(v[0]), saved[1] = sigmoid(v[1]), saved[2] = tanh_of(v[2]), saved[3] = sigmoid(v[3]);
            saved[4] = saved[1] * c[e] + saved[0] * saved[2];
            c[e] = real ? saved[4] : c[e];
            return saved[3] * tanh_of(saved[4]);
        }
    }

    // What a layer leaves in global memory.
    template <int STAGE> DEVICE void store(int k, const float* saved) {
        constexpr bool hidden = is_hidden(STAGE);
        constexpr int count = traced(STAGE), apart = hidden ? HIDDEN : D;
        const int layer = layers_before(STAGE) + k;
        const int base = hidden ? widths_before(STAGE) + k * features(STAGE)
                       : CELL == DMU ? AFTER_HIDDEN : CELL == RHN ? 2 * D * layer : 0;
        for_own<features(STAGE)>([&](int e, int row, int feature) {
            if (!in_batch(row)) return;
            const bool real = is_real(row);
            if (SAVE && count) {
                Value* step = trace.at(row, feature);
#pragma unroll
                for (int k = 0; k < count; ++k) put(step + base + k * apart, real ? saved[e * count + k] : 0.f);
                if (CELL == RHN && layer < LAYERS - 1) put(step + 2 * D * LAYERS + layer * D, real ? h[e] : 0.f);
            }
            if (layer == LAYERS - 1) put(y.at(row, feature), real ? h[e] : 0.f);
        });
    }

    DEVICE void run_all() {
        const unsigned cut = cut_rows(fetch_reset(begin), begin);
        if (LAYERS == 1) next_cut = cut_rows(fetch_reset(begin + 1), begin + 1);
        load_states(h, a.h0);
        if (CELL == LSTM) load_states(c, a.c0);
        for_own<D>([&](int e, int row, int feature) {
            if constexpr (STATE_MASK) mask[e] = state_mask(row, feature);
        });
        forget(cut);
        send_state(cut);
        projected = place<gates(0) * features(0)>(a.projected, smaller(begin, steps - 1));
        trace = place<TRACE>(a.trace, begin), y = place<D>(a.y, begin);
        fetch(begin);
        all_sent<all_slices(D), 0>(0);
        for (int s = begin; s < end; ++s) {
            begin_step(s);
            stages<0>(s);
            trace = trace.moved(later), y = y.moved(later);
        }
        for_own<D>([&](int e, int row, int feature) {
            if (!in_batch(row)) return;
            put(a.h_n + sequence(row) * D + feature, h[e]);
            if (CELL == LSTM) put(a.c_n + sequence(row) * D + feature, c[e]);
        });
        if constexpr (streams) stream.finish();
    }
};

struct Backward : Sweep<true> {
    static constexpr int VALUES = CELL == DMU || CELL == RHN ? 2 : CELL == RNN ? 1 : CELL == GRU ? 4 : 6;
    float dh[OWN], dc[CELL == LSTM ? OWN : 1];
    // Of the step to come, fetched one step early: gradient of y, state before the step, gates.
    Value grad[OWN], h_before[OWN], values[OWN * VALUES];
    const Value* grad_y[OWN];  // of the step to come
    int64 later_grad_y;        // from a step to the next one of the sweep forward
    Place<Value, TRACE> trace, trace_to_come, trace_before;  // of this step, the one to come, and the one before that
    Place<Value, D> y_to_come, y_before;
    Place<Value, DELTAS> deltas_of_step;
    const Value *h_starts[DIRECT ? OWN : 1], *c_starts[DIRECT && CELL == LSTM ? OWN : 1];  // states before the first step
    unsigned first_rows;  // whose first step it is, of the step that was fetched last
    float mask[STATE_MASK ? OWN : 1];
    unsigned char reset;  // of the row of this lane before the step to come
    unsigned cut;         // rows whose state was lost before this step
    float of_hidden[RESIDUAL ? elements(features(0)) : 1];  // the gradient of a hidden layer, which the one below adds to
    // Hidden activations or slopes of a dmu, inner values of an rhn. The layers of a stage share a place; when one has used it,
    // those of the layer before it are fetched. Those of a stage's last layer are fetched when the step starts or, in a single
    // block, whose steps are short, one step early.
    static constexpr int LAST = STAGES - 1, INNER = CELL == DMU ? 1 : CELL == RHN ? 3 : 0;
    Value inner[larger(1, INNER * elements_before(STAGES))];

    DEVICE Backward(const Arguments& a) : Sweep(a) {}

    // The state before a step, from where it is `before`. What is fetched for padding, or for rows beyond the batch, is read
    // from somewhere and used nowhere.
    DEVICE const Value* start_of(const Value* start, int row, int feature) const {
        return start ? start + sequence(row) * D + feature : zero();
    }
    DEVICE const Value* h_start(int e, int row, int feature) const {
        return DIRECT ? h_starts[e] : start_of(a.h0, row, feature);
    }
    DEVICE const Value* c_start(int e, int row, int feature) const {
        return DIRECT ? c_starts[e] : start_of(a.c0, row, feature);
    }

    DEVICE void fetch(int next) {
        const int s = larger(next, 0);
        reset = fetch_reset(next);
        first_rows = in_lanes(s == 0 || ((s - 1) ^ flip) >= limit_of_lane);
        for_fetched<D>([&](int e, int row, int feature) {
            grad[e] = *grad_y[e];
            const bool first = has(first_rows, row);
            if (CELL != RHN || LAYERS == 1) h_before[e] = *(first ? h_start(e, row, feature) : y_before.at(row, feature));
            const Value* step = (CLUSTER == 1 ? trace_to_come : trace.moved(next < 0 ? 0 : -later)).at(row, feature);
            Value* v = values + e * VALUES;
            if constexpr (CELL == DMU) {
                v[0] = step[AFTER_HIDDEN], v[1] = step[AFTER_HIDDEN + D];
            } else if constexpr (CELL == RHN) {
                v[0] = step[2 * D * (LAYERS - 1)], v[1] = step[2 * D * (LAYERS - 1) + D];
                if (LAYERS > 1) h_before[e] = step[2 * D * LAYERS + (LAYERS - 2) * D];
            } else if constexpr (CELL == RNN) {
                v[0] = *y_to_come.at(row, feature);
            } else {
#pragma unroll
                for (int k = 0; k < (CELL == GRU ? 4 : 5); ++k) v[k] = step[k * D];
                if (CELL == LSTM) v[5] = *(first ? c_start(e, row, feature) : trace_before.at(row, 4 * D + feature));
            }
        });
    }

    // Of this step, or of the one to come: the one that was fetched last.
    template <int STAGE> DEVICE void fetch_inner(bool to_come, int k) {
        const int layer = layers_before(STAGE) + k;
        for_fetched<features(STAGE)>([&](int e, int row, int feature) {
            const Value* step = (to_come ? trace_to_come : trace).at(row, feature);
            Value* v = inner + INNER * (elements_before(STAGE) + e);
            if constexpr (CELL == DMU) {
                v[0] = step[(SLOPES ? HIDDEN : 0) + widths_before(STAGE) + k * features(STAGE)];
            } else {
                v[0] = step[2 * D * layer], v[1] = step[2 * D * layer + D];
                const auto before = to_come ? y_before : y_before.moved(later);
                v[2] = STAGE > 0 ? step[2 * D * LAYERS + (layer - 1) * D]
                                 : *(has(first_rows, row) ? h_start(e, row, feature) : before.at(row, feature));
            }
        });
    }
    // The first layer of a stage, going back, that has its values in `inner`; those of the uppermost one are in `values`.
    template <int STAGE> static constexpr int first_inner = layers_of<STAGE> - (STAGE == LAST ? 2 : 1);
    template <int STAGE> DEVICE void fetch_next_inner(int k) {  // after layer k
        if (layers_of<STAGE> > 1 && k > 0) fetch_inner<STAGE>(false, k - 1);
        else if (CLUSTER == 1) fetch_inner<STAGE>(true, first_inner<STAGE>);
    }
    template <int STAGE = 0> DEVICE void fetch_first_inner(bool to_come) {
        if constexpr (INNER > 0 && STAGE < STAGES) {
            if constexpr (first_inner<STAGE> >= 0) fetch_inner<STAGE>(to_come, first_inner<STAGE>);
            fetch_first_inner<STAGE + 1>(to_come);
        }
    }

    // Deltas of one element's gates, from the gradient `g` of its state; returns what skips the product.
    DEVICE float gate_deltas(float g, float before, const float* v, float* delta, float& dc) {
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

    // From the gradient of the state after layer k of a stage to that before it.
    template <int STAGE> DEVICE void state_layer(int s, int k) {
        constexpr int G = gates(STAGE);
        const bool top = STAGE == LAST && k == layers_of<STAGE> - 1;
        if (top && CLUSTER > 1) fetch_first_inner(false);
        float carry[OWN], deltas[OWN * 4];
        for_registers<D>([&](int e, int row, int feature) {
            const bool real = is_real(row);
            float* delta = deltas + e * 4;
            const Value* below = inner + INNER * (elements_before(STAGE) + e);
            float v[VALUES];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] = to_float(top || INNER < 3 ? values[e * VALUES + i] : below[i]);
            const float g = top ? dh[e] + to_float(grad[e]) : dh[e];
            float before = to_float(top || INNER < 3 ? h_before[e] : below[2]);
            if (RESETS && (CELL != RHN || layers_before(STAGE) + k == 0) && has(cut, row)) {
                before = 0.f;
                if (CELL == LSTM) v[VALUES - 1] = 0.f;
            }
            float of_c = dc[CELL == LSTM ? e : 0];
            const float skips = gate_deltas(g, before, v, delta, of_c);
            carry[e] = real ? skips : dh[e];
            if (CELL == LSTM) dc[e] = real ? of_c : dc[e];
#pragma unroll
            for (int k = 0; k < (CELL == GRU ? 4 : G); ++k) delta[k] = real ? delta[k] : 0.f;
        });
#pragma unroll
        for (int g = 0; g < G; ++g) send<D, 4, G>(deltas + g, g * all_slices(D));
        const auto store = [&] {
            for_own<D>([&](int e, int row, int feature) {
                if (!in_batch(row)) return;
                const float* delta = deltas + e * 4;
                Value* step = deltas_of_step.at(row, outputs_before(STAGE) + k * G * D + feature);
#pragma unroll
                for (int g = 0; g < G; ++g) put(step + g * D, delta[CELL == GRU && g == 2 ? 3 : g]);
                if (CELL == GRU) put(step + 3 * D, delta[2]);
            });
        };
        if (CLUSTER > 1) store();
        if (top && DIRECT && LAYERS == 1) fetch(s - 1);  // a step is not much longer than it takes
        all_sent<G * all_slices(D), STAGE>(k);
        if (CLUSTER == 1) store();
        if (top && DIRECT && LAYERS > 1) fetch(s - 1);
        if constexpr (CELL == DMU && STAGES > 1) {
            multiply<STAGE>(k);
            hidden_stages<STAGE - 1>(s);
            for_registers<D>([&](int e, int row, int feature) { dh[e] = carry[e] + of_state<0>(e, row, feature); });
        } else {
            if (top && !DIRECT) fetch(s - 1);
            if constexpr (CELL == RHN)
                if (!top) fetch_next_inner<STAGE>(k);
            multiply<STAGE>(k);
            for_registers<D>([&](int e, int row, int feature) { dh[e] = carry[e] + of_state<STAGE>(e, row, feature); });
        }
    }
    template <int STAGE> DEVICE float of_state(int e, int row, int feature) const {  // by way of a layer's weights
        const float seen = total<STAGE>(e, 0, row, feature);
        return STATE_MASK ? seen * mask[STATE_MASK ? e : 0] : seen;
    }
    template <int STAGE> DEVICE void state_stages(int s) {
        if constexpr (layers_of<STAGE> == 1) state_layer<STAGE>(s, 0);
        else
#pragma unroll 1
            for (int k = layers_of<STAGE> - 1; k >= 0; --k) state_layer<STAGE>(s, k);
        if constexpr (CELL == RHN && STAGE > 0) state_stages<STAGE - 1>(s);
    }

    // Layer k of a hidden stage of a dmu: the product of the layer ABOVE has just been taken.
    template <int STAGE, int ABOVE> DEVICE void hidden_layer(int s, int k) {
        constexpr int F = features(STAGE);
        float delta[elements(F)];
        for_registers<F>([&](int e, int row, int feature) {
            float gradient = total<ABOVE>(e, 0, row, feature);
            if constexpr (RESIDUAL) {
                if (ABOVE < LAST) gradient += of_hidden[e];
                of_hidden[e] = gradient;
            }
            const bool real = is_real(row);
            const float known = only_if(real, to_float(inner[elements_before(STAGE) + e]));
            delta[e] = real ? gradient * (SLOPES ? known : slope_from(known)) : 0.f;
        });
        send<F>(delta);
        fetch_next_inner<STAGE>(k);
        const auto store = [&] {
            for_own<F>([&](int e, int row, int feature) {
                if (in_batch(row)) put(deltas_of_step.at(row, outputs_before(STAGE) + k * F + feature), delta[e]);
            });
        };
        if (CLUSTER > 1) store();
        if (STAGE == LAST - 1 && k == layers_of<STAGE> - 1 && !DIRECT) fetch(s - 1);
        all_sent<all_slices(F), STAGE>(k);
        if (CLUSTER == 1) store();
        multiply<STAGE>(k);
    }
    template <int STAGE> DEVICE void hidden_stages(int s) {
        hidden_layer<STAGE, STAGE + 1>(s, layers_of<STAGE> - 1);
        if constexpr (layers_of<STAGE> > 1)
#pragma unroll 1
            for (int k = layers_of<STAGE> - 2; k >= 0; --k) hidden_layer<STAGE, STAGE>(s, k);
        if constexpr (STAGE > 0) hidden_stages<STAGE - 1>(s);
    }

    DEVICE void move_to(int s) {  // for what comes before the first step, anything that is there will do
        const int earlier = s > 0 ? -later : 0;
        trace = trace.moved(-later), deltas_of_step = deltas_of_step.moved(-later);
        trace_to_come = trace_to_come.moved(earlier), trace_before = trace_before.moved(-later);
        y_to_come = y_to_come.moved(earlier), y_before = y_before.moved(-later);
#pragma unroll
        for (int e = 0; e < OWN; ++e) grad_y[e] -= s > 0 ? later_grad_y : 0;
    }
    DEVICE void run_all() {
        load_states(dh, a.h_n);
        if (CELL == LSTM) load_states(dc, a.c_n);
        for_own<D>([&](int e, int row, int feature) {
            if constexpr (STATE_MASK) mask[e] = state_mask(row, feature);
        });
        const int last = larger(end - 1, 0);
        for_fetched<D>([&](int e, int row, int feature) {
            grad_y[e] = !a.grad_y ? zero() : a.grad_y + run * a.grad_y_run + (first + row) * a.grad_y_row
                                             + feature * a.grad_y_feature + time(last) * a.grad_y_step;
        });
        if (DIRECT)
            for_fetched<D>([&](int e, int row, int feature) {
                h_starts[e] = start_of(a.h0, row, feature);
                if (CELL == LSTM) c_starts[e] = start_of(a.c0, row, feature);
            });
        later_grad_y = !a.grad_y ? 0 : a.reverse ? -a.grad_y_step : a.grad_y_step;
        trace = place<TRACE>(a.trace, end), trace_to_come = place<TRACE>(a.trace, last);
        deltas_of_step = place<DELTAS>(a.deltas, end);
        trace_before = place<TRACE>(a.trace, end - 2), y_before = place<D>(a.y, end - 2), y_to_come = place<D>(a.y, last);
        fetch(end - 1);
        if (CLUSTER == 1) fetch_first_inner(true);
        for (int s = end - 1; s >= begin; --s) {
            move_to(s);
            cut = cut_rows(reset, s);
            begin_step(s);
            state_stages<LAST>(s);
            for_registers<D>([&](int e, int row, int) {
                if (RESETS && has(cut, row)) dh[e] = 0.f, dc[CELL == LSTM ? e : 0] = 0.f;
            });
        }
        for_own<D>([&](int e, int row, int feature) {
            if (!in_batch(row)) return;
            if (a.grad_h0) put(a.grad_h0 + sequence(row) * D + feature, dh[e]);
            if (CELL == LSTM && a.grad_c0) put(a.grad_c0 + sequence(row) * D + feature, dc[e]);
        });
        if constexpr (streams) stream.finish();
    }
};
