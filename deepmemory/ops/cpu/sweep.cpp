// The loop over time, forward and backward. Compiled once per instruction-set level.
//
// A part (some tiles of rows of one run) goes through all its steps on one thread. What needs no recurrence is
// done for a chunk of steps at a time: the projection of x, its gradient and the gradients of the weights.
#include <new>

#include "cells.h"

namespace DM_LEVEL {

namespace {

constexpr i64 kStepsAhead = 8;  // of records asked for before they are needed

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

template <class T>
void add(i64 count, const T* from, T* to) {
  for (i64 i = 0; i < count; i++) to[i] += from[i];
}

// Where a map's sums start among those of a group: first its weight's, then its bias's.
template <class T>
i64 sums_before(const Plan& plan, i64 linear) {
  Maps<T> maps(plan);
  i64 size = 0;
  for (i64 i = 0; i < linear; i++) size += maps.weight_sums(plan.linear[i]) + maps.bias_sums(plan.linear[i]);
  return size;
}

// Whole lines, so that sums lie one behind the other.
template <class T>
i64 gradient_size(const Plan& plan) {
  return plan.padded(sums_before<T>(plan, plan.linears));
}

// Extras are masks, residuals and resets. Sweeps with and without them are compiled apart: a layer that has none of
// them does not pay for them.
template <class T, bool Extras>
class Sweep {
 public:
  Sweep(const Plan& p, i64 part)
      : plan(p), call(p.call), run(part / p.parts), part(part % p.parts), maps(p), transition(p, maps) {}

  bool forward() {
    Buffer memory(*this, &Sweep::bind_forward);
    if (!memory.block) return false;
    maps.pack(run, false);
    const i64 end = plan.first_tile(plan.first_group(part + 1));
    for (i64 tile = plan.first_tile(plan.first_group(part)); tile < end; tile++) forward_tile(tile);
    return true;
  }

  bool backward(T* first) {
    Buffer memory(*this, &Sweep::bind_backward);
    if (!memory.block) return false;
    maps.pack(run, true);
    const i64 size = gradient_size<T>(plan);
    sums = first;
    for (i64 group = plan.first_group(part); group < plan.first_group(part + 1); group++) {
      std::memset(sums, 0, sizeof(T) * size);
      for (i64 tile = plan.first_tile(group); tile < plan.first_tile(group + 1); tile++) backward_tile(tile);
      if (plan.parts == 1 && group > 0)
        add(size, sums, first);
      else
        sums += size;
    }
    return true;
  }

 private:
  using P = Panel<T>;
  using Const = Panel<const T>;

  struct Buffer {
    char* block;
    Buffer(Sweep& sweep, void (Sweep::*bind)(Arena&)) {
      Arena arena;
      (sweep.*bind)(arena);
      block = static_cast<char*>(::operator new(size_t(arena.used), std::align_val_t(64), std::nothrow));
      arena = {block, 0};
      if (block) (sweep.*bind)(arena);
    }
    ~Buffer() { ::operator delete(block, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
  };

  const Plan& plan;
  const Call& call;
  const i64 run, part;
  Maps<T> maps;
  Transition<T, Extras> transition;

  // The tile at hand.
  i64 row0 = 0, rows = 0, tile_index = 0, shortest = 0, longest = 0;
  const i64* lengths = nullptr;     // of its rows
  const uint8_t* resets = nullptr;  // of its rows, at the first step

  // Scratch. Panels of a chunk lie one behind the other in the order of time.
  T *h = nullptr, *c = nullptr, *h_kept = nullptr, *c_kept = nullptr;
  T *xs = nullptr, *projected = nullptr, *spare_record = nullptr;
  T *gys = nullptr, *previous = nullptr, *deltas = nullptr, *grad_xs = nullptr, *sums = nullptr;
  T* seen = nullptr;  // a chunk of inputs of one map, where a mask or a residual alters them

  // A panel for each step of a chunk.
  template <class A>
  struct Steps {
    Panel<A> first;
    i64 step;
    Panel<A> at(i64 i) const { return first.from(i * step); }
  };

  // Distances between rows of a panel; a panel of a chunk's step starts `rows` (or one tile) after the last.
  i64 row_ld(i64 elements) const { return plan.lanes ? kLanes : elements; }
  i64 step_of(i64 elements) const { return plan.lanes ? elements : elements * rows; }
  i64 panel_size(i64 elements) const { return plan.lanes ? elements : elements * plan.tile_rows; }
  // A multiple of the line but never an even one, lest the rows of a chunk collide in the cache.
  i64 chunk_ld(i64 width) const {
    if (plan.lanes) return width * kLanes;
    return plan.padded(width) / kLanes % 2 ? plan.padded(width) : plan.padded(width) + kLanes;
  }
  i64 layer0_ld() const {
    const Layer& first = plan.layer[0];
    return chunk_ld(first.slots * (plan.lanes ? first.width : plan.span(first.width)));
  }
  i64 state_span() const { return plan.span(call.width); }

  P state_panel(T* at) const { return {at, row_ld(state_span())}; }

  void bind_state(Arena& arena) {
    T** all[] = {&h, &c, &h_kept, &c_kept};
    for (T** at : all) *at = arena.take<T>(panel_size(state_span()));
  }

  void bind_transition(Arena& arena) {
    if (!Extras) return;
    if (call.state_mask) transition.state_mask = state_panel(arena.take<T>(panel_size(state_span())));
    if (call.hidden_mask && plan.mask) transition.hidden_mask = {arena.take<T>(panel_size(plan.mask)), row_ld(plan.mask)};
    const i64 span = plan.span(plan.widest);
    transition.scratch = {arena.take<T>(panel_size(span)), row_ld(span)};
  }

  void bind_forward(Arena& arena) {
    maps.bind(arena, false);
    bind_state(arena);
    bind_transition(arena);
    xs = arena.take<T>(plan.chunk * panel_size(chunk_ld(call.inputs)));
    projected = arena.take<T>(plan.chunk * panel_size(layer0_ld()));
    spare_record = call.trace ? nullptr : arena.take<T>(panel_size(plan.record));
  }

  void bind_backward(Arena& arena) {
    maps.bind(arena, true);
    bind_state(arena);
    bind_transition(arena);
    if (Extras) seen = arena.take<T>(plan.chunk * panel_size(chunk_ld(plan.widest)));
    if (needs_gradient(0)) xs = arena.take<T>(plan.chunk * panel_size(chunk_ld(call.inputs)));
    if (call.grad_x) grad_xs = arena.take<T>(plan.chunk * panel_size(chunk_ld(call.inputs)));
    gys = arena.take<T>(plan.chunk * panel_size(state_span()));
    if (!plan.lanes) previous = arena.take<T>(plan.chunk * panel_size(chunk_ld(call.width)));
    deltas = arena.take<T>(plan.chunk * panel_size(plan.delta));
  }

  bool needs_gradient(i64 i) const { return needs_weight(i) || needs_bias(i); }
  bool needs_weight(i64 i) const { return call.weight[plan.linear[i].weight].grad; }
  bool needs_bias(i64 i) const { return plan.linear[i].bias >= 0 && call.weight[plan.linear[i].bias].grad; }

  void open(i64 tile) {
    tile_index = tile;
    row0 = tile * plan.tile_rows;
    rows = smaller(plan.tile_rows, call.batch - row0);
    maps.rows = rows;
    if (Extras) load_masks();
    if (Extras && call.resets) resets = call.resets + run * call.resets_run + row0;
    shortest = longest = call.steps;
    if (!call.lengths) return;
    lengths = call.lengths + run * call.lengths_run + row0;
    shortest = call.steps, longest = 0;
    for (i64 r = 0; r < rows; r++) {
      const i64 length = lengths[r] < 0 ? 0 : smaller(lengths[r], call.steps);
      if (length < shortest) shortest = length;
      if (length > longest) longest = length;
    }
  }

  bool active(i64 r, i64 t) const { return !lengths || t < lengths[r]; }
  bool all_active(i64 t) const { return t < shortest; }
  bool reset(i64 r, i64 t) const { return resets[t * call.batch + r]; }
  bool any_reset(i64 t) const {
    if (!Extras || !resets) return false;
    const uint8_t* at = resets + t * call.batch;
    uint64_t any = 0, eight;
    i64 r = 0;
    for (; r + 8 <= rows; r += 8) {
      std::memcpy(&eight, at + r, 8);
      any |= eight;
    }
    for (; r < rows; r++) any |= at[r];
    return any;
  }

  P record(i64 t) const {
    if (!call.trace) return {spare_record, row_ld(plan.record)};
    T* first = static_cast<T*>(call.trace) + deepmemory::kTraceHeader;
    // Records of a tile are together, so that those of a chunk are rows of one matrix.
    const i64 before = plan.lanes ? run * plan.tiles + tile_index : run * call.batch + row0;
    return {first + before * call.steps * plan.record + t * step_of(plan.record), row_ld(plan.record)};
  }

  // Between the caller's rows and panels.

  // A step's rows into a panel; rows past their length become zero whatever stands there.
  void load_rows(const T* from, i64 row, i64 feature, i64 width, i64 t, P to) const {
    if (plan.lanes) {
      if (rows == kLanes)  // a count the compiler knows
        for (i64 f = 0; f < width; f++)
          for (i64 r = 0; r < kLanes; r++) to.at[f * kLanes + r] = from[r * row + f * feature];
      else
        for (i64 f = 0; f < width; f++)
          for (i64 r = 0; r < kLanes; r++) to.at[f * kLanes + r] = r < rows ? from[r * row + f * feature] : T(0);
      if (!all_active(t))
        for (i64 r = 0; r < rows; r++)
          for (i64 f = 0; f < width && !active(r, t); f++) to.at[f * kLanes + r] = T(0);
      return;
    }
    for (i64 r = 0; r < rows; r++) {
      const T* source = from + r * row;
      T* target = to.at + r * to.ld;
      if (!active(r, t))
        std::memset(target, 0, sizeof(T) * width);
      else if (feature == 1)
        std::memcpy(target, source, sizeof(T) * width);
      else
        for (i64 f = 0; f < width; f++) target[f] = source[f * feature];
      for (i64 f = width; f < plan.padded(width); f++) target[f] = T(0);
    }
  }

  void store_rows(Const from, i64 width, i64 t, T* to) const {
    if (plan.lanes && rows == kLanes && all_active(t)) {
      for (i64 f = 0; f < width; f++)
        for (i64 r = 0; r < kLanes; r++) to[r * width + f] = from.at[f * kLanes + r];
      return;
    }
    for (i64 r = 0; r < rows; r++) {
      T* target = to + r * width;
      if (!active(r, t))
        std::memset(target, 0, sizeof(T) * width);
      else if (plan.lanes)
        for (i64 f = 0; f < width; f++) target[f] = from.at[f * kLanes + r];
      else
        std::memcpy(target, from.at + r * from.ld, sizeof(T) * width);
    }
  }

  static constexpr i64 kAlways = INT64_MIN;  // a time before every length, negative ones included

  // `width` columns of a tensor (R, B, columns), beginning with column `first`.
  void load_columns(const void* all, i64 run_stride, i64 columns, i64 first, i64 width, P to) const {
    const T* from = static_cast<const T*>(all) + run * run_stride + row0 * columns + first;
    load_rows(from, columns, 1, width, kAlways, to);
  }
  void load_state(const void* all, i64 run_stride, T* to) const {
    if (all)
      load_columns(all, run_stride, call.width, 0, call.width, state_panel(to));
    else
      std::memset(to, 0, sizeof(T) * panel_size(state_span()));
  }
  void store_state(const T* from, void* all) const {
    if (!all) return;
    T* to = static_cast<T*>(all) + (run * call.batch + row0) * call.width;
    store_rows({from, row_ld(state_span())}, call.width, kAlways, to);
  }

  void load_masks() const {
    if (call.state_mask) load_state(call.state_mask, call.state_mask_run, transition.state_mask.at);
    if (!transition.hidden_mask.at) return;
    i64 columns = 0, first = 0;
    for (i64 l = 0; l + 1 < plan.layers; l++) columns += plan.layer[l].width;
    for (i64 l = 0; l + 1 < plan.layers; first += plan.layer[l++].width)
      load_columns(call.hidden_mask, call.hidden_mask_run, columns, first, plan.layer[l].width,
                   transition.hidden_mask.from(plan.layer[l].mask));
  }

  void keep(const T* from, T* to) const { std::memcpy(to, from, sizeof(T) * step_of(state_span())); }

  // Rows past their length take what was kept.
  void put_back(const T* kept, T* state, i64 t) const {
    const i64 span = state_span();
    for (i64 r = 0; r < rows; r++) {
      if (active(r, t)) continue;
      if (plan.lanes)
        for (i64 at = r; at < span; at += kLanes) state[at] = kept[at];
      else
        std::memcpy(state + r * span, kept + r * span, sizeof(T) * span);
    }
  }

  // A sum over rows meets those past their length too, and lanes without a row: there all of its factors are zero,
  // whatever the step made of them (0 * inf is NaN).
  void clear_idle(P panel, i64 elements, i64 t) const {
    if (all_active(t) && (!plan.lanes || rows == kLanes)) return;
    clear(panel, elements, [&](i64 r) { return !active(r, t); });
  }

  // Zeroes the chosen rows, and lanes without a row.
  template <class Rows>
  void clear(P panel, i64 elements, Rows chosen) const {
    if (!plan.lanes) {
      for (i64 r = 0; r < rows; r++)
        if (chosen(r)) std::memset(panel.at + r * panel.ld, 0, sizeof(T) * elements);
      return;
    }
    constexpr i64 W = lanes_of<T>;
    T busy[kLanes] = {};
    for (i64 r = 0; r < rows; r++) busy[r] = chosen(r) ? T(0) : T(1);
    for (i64 at = 0; at < elements; at += W)
      store<T>(panel.at + at, load<T>(busy + at % kLanes) > T(0) ? load<T>(panel.at + at) : Vec<T>{});
  }

  // Zeroes h and c, before a step the state and after its backward pass the gradient, where the step has a reset.
  void cut(i64 t) const {
    if (!any_reset(t)) return;
    auto chosen = [&](i64 r) { return reset(r, t); };
    clear(state_panel(h), state_span(), chosen);
    if (call.cell == deepmemory::kLstm) clear(state_panel(c), state_span(), chosen);
  }

  void load_x(i64 low, i64 count) const {
    const T* x = static_cast<const T*>(call.x) + run * call.x_run + row0 * call.x_row;
    const i64 ld = chunk_ld(call.inputs);
    for (i64 t = low; t < low + count; t++)
      load_rows(x + t * call.x_step, call.x_row, call.x_feature, call.inputs, t,
                {xs + (t - low) * step_of(ld), row_ld(ld)});
  }

  // Steps in the order of the walk, a chunk at a time: chunk(low, count), then step(t, low).
  template <class Chunk, class Step, class Done>
  void walk(bool down, Chunk chunk, Step step, Done done) {
    for (i64 passed = 0; passed < longest; passed += plan.chunk) {
      const i64 count = smaller(plan.chunk, longest - passed);
      const i64 low = down ? longest - passed - count : passed;
      chunk(low, count);
      for (i64 i = 0; i < count; i++) step(down ? low + count - 1 - i : low + i, low);
      done(low, count);
    }
  }

  void project(i64 low, i64 count) {
    load_x(low, count);
    const i64 x_ld = chunk_ld(call.inputs), ld = layer0_ld();
    const i64 calls = plan.lanes ? count : 1;  // rows of all steps at once where a row is a row
    for (i64 i = 0; i < calls; i++)
      maps.apply(0, {xs + i * step_of(x_ld), row_ld(x_ld)}, maps.bias(0), {projected + i * step_of(ld), row_ld(ld)},
                 count * rows);
    // Slots that x does not feed start from their bias.
    const Layer& first = plan.layer[0];
    const i64 fed = plan.linear[0].slots * plan.span(first.width), all = first.slots * plan.span(first.width);
    for (i64 i = 0; fed < all && i < (plan.lanes ? count : count * rows); i++)
      std::memcpy(projected + i * ld + fed, maps.bias(0).at + fed, sizeof(T) * (all - fed));
  }

  void forward_step(i64 t, i64 low) {
    const i64 ld = layer0_ld();
    const bool whole = all_active(t), two = call.cell == deepmemory::kLstm;
    if (!whole) {
      keep(h, h_kept);
      if (two) keep(c, c_kept);
    }
    cut(t);
    P at = record(t);
    if (plan.lanes && call.trace) std::memcpy(at.at + plan.previous, h, sizeof(T) * state_span());
    transition.forward(state_panel(h), state_panel(c), {projected + (t - low) * step_of(ld), row_ld(ld)}, at);
    if (call.trace) clear_idle(at, plan.record, t);
    if (call.trace && plan.unused)
      for (i64 r = 0; r < rows; r++) std::memset(at.at + (r + 1) * at.ld - plan.unused, 0, sizeof(T) * plan.unused);
    if (!whole) {
      put_back(h_kept, h, t);
      if (two) put_back(c_kept, c, t);
    }
    store_rows({h, row_ld(state_span())}, call.width, t, y_at(t));
  }

  T* y_at(i64 t) const { return static_cast<T*>(call.y) + ((run * call.steps + t) * call.batch + row0) * call.width; }

  void forward_tile(i64 tile) {
    open(tile);
    load_state(call.state[0].start, call.state[0].start_run, h);
    if (call.cell == deepmemory::kLstm) load_state(call.state[1].start, call.state[1].start_run, c);
    walk(
        call.reverse, [&](i64 low, i64 count) { project(low, count); },
        [&](i64 t, i64 low) { forward_step(t, low); }, [](i64, i64) {});
    for (i64 t = longest; t < call.steps; t++) std::memset(y_at(t), 0, sizeof(T) * rows * call.width);
    // Nobody reads a record of a step that did not happen, but a result of an operator must have a value everywhere.
    if (call.trace) std::memset(record(longest).at, 0, sizeof(T) * (call.steps - longest) * step_of(plan.record));
    store_state(h, call.state[0].final);
    if (call.cell == deepmemory::kLstm) store_state(c, call.state[1].final);
  }

  // The state before step t: y of the step the walk came from, or the start; zero after a reset and past the length.
  void load_previous(i64 t, P to) const {
    const i64 before = call.reverse ? t + 1 : t - 1;
    const T* y = y_at(before);
    const T* start = static_cast<const T*>(call.state[0].start) + run * call.state[0].start_run + row0 * call.width;
    for (i64 r = 0; r < rows; r++) {
      const bool inside = before >= 0 && before < call.steps && active(r, before);
      std::memcpy(to.at + r * to.ld, (inside ? y : start) + r * call.width, sizeof(T) * call.width);
      for (i64 f = call.width; f < plan.padded(call.width); f++) to.at[r * to.ld + f] = T(0);
    }
    clear_idle(to, call.width, t);
    if (any_reset(t)) clear(to, call.width, [&](i64 r) { return reset(r, t); });
  }

  void begin_chunk(i64 low, i64 count) {
    if (needs_gradient(0)) load_x(low, count);
    const T* gy = static_cast<const T*>(call.grad_y) + run * call.gy_run + row0 * call.gy_row;
    const i64 ld = chunk_ld(call.width), span = state_span();
    for (i64 t = low; t < low + count; t++) {
      if (call.grad_y)
        load_rows(gy + t * call.gy_step, call.gy_row, call.gy_feature, call.width, t,
                  state_panel(gys + (t - low) * step_of(span)));
      if (!plan.lanes) load_previous(t, {previous + (t - low) * step_of(ld), ld});
    }
  }

  Const previous_at(i64 t, i64 low) const {
    if (plan.lanes) return {record(t).at + plan.previous, kLanes};
    const i64 ld = chunk_ld(call.width);
    return {previous + (t - low) * step_of(ld), ld};
  }

  // Small states leave the processor waiting for records, which it does not foresee when time runs backward.
  void expect_record(i64 t) const {
    if (!plan.lanes || t < 0 || t >= longest) return;
    const char* at = reinterpret_cast<const char*>(record(t).at);
    for (i64 byte = 0; byte < plan.record * i64(sizeof(T)); byte += 64) __builtin_prefetch(at + byte);
  }

  void backward_step(i64 t, i64 low) {
    expect_record(call.reverse ? t + kStepsAhead : t - kStepsAhead);
    const bool whole = all_active(t), two = call.cell == deepmemory::kLstm;
    if (!whole) {
      keep(h, h_kept);
      if (two) keep(c, c_kept);
    }
    if (call.grad_y) {
      const T* gy = gys + (t - low) * step_of(state_span());
      for (i64 j = 0; j < step_of(state_span()); j += lanes_of<T>) store<T>(h + j, load<T>(h + j) + load<T>(gy + j));
    }
    P at = record(t), delta{deltas + (t - low) * step_of(plan.delta), row_ld(plan.delta)};
    transition.backward(state_panel(h), state_panel(c), previous_at(t, low), {at.at, at.ld}, delta);
    clear_idle(delta, plan.delta, t);  // nothing flows into a step that did not happen
    cut(t);
    if (!whole) {
      put_back(h_kept, h, t);
      if (two) put_back(c_kept, c, t);
    }
  }

  // What a map saw of its inputs at every step of a chunk; `below` is what the map before it saw.
  Steps<const T> seen_of(const Linear& l, Steps<const T> inputs, Steps<const T> below, i64 low, i64 count) const {
    if (!transition.alters(l.layer)) return inputs;
    const i64 ld = chunk_ld(plan.widest);
    const Steps<T> room{{seen, row_ld(ld)}, step_of(ld)};
    for (i64 i = 0; i < count; i++) {
      transition.seen(l.layer, inputs.at(i), below.at(i), room.at(i));
      clear_idle(room.at(i), plan.lanes ? l.in * kLanes : l.in, low + i);
    }
    return {{seen, row_ld(ld)}, room.step};
  }

  void end_chunk(i64 low, i64 count) {
    const Const delta{deltas, row_ld(plan.delta)};
    const i64 delta_step = step_of(plan.delta), x_ld = chunk_ld(call.inputs);
    const P at = record(low);
    const Const first = previous_at(low, low);
    Steps<const T> in{{xs, row_ld(x_ld)}, step_of(x_ld)};
    T* to = sums;
    for (i64 i = 0; i < plan.linears; i++) {
      const Linear& l = plan.linear[i];
      if (i > 0) {
        const i64 step = plan.lanes || l.layer > 0 ? step_of(plan.record) : step_of(first.ld);
        in = seen_of(l, {transition.input(l, first, {at.at, at.ld}), step}, in, low, count);
      }
      if (needs_weight(i)) maps.add_gradient(l, in.first, in.step, delta, delta_step, count, to);
      to += maps.weight_sums(l);
      if (needs_bias(i)) maps.add_bias_gradient(l, delta, delta_step, count, to);
      to += maps.bias_sums(l);
    }
    if (!call.grad_x) return;
    const i64 calls = plan.lanes ? count : 1;
    for (i64 i = 0; i < calls; i++)
      maps.apply_transposed(0, {deltas + i * delta_step, row_ld(plan.delta)}, {nullptr, 0},
                            {grad_xs + i * step_of(x_ld), row_ld(x_ld)}, count * rows);
    for (i64 t = low; t < low + count; t++)
      store_rows({grad_xs + (t - low) * step_of(x_ld), row_ld(x_ld)}, call.inputs, t, grad_x_at(t));
  }

  T* grad_x_at(i64 t) const {
    return static_cast<T*>(call.grad_x) + ((run * call.steps + t) * call.batch + row0) * call.inputs;
  }

  void backward_tile(i64 tile) {
    open(tile);
    load_state(call.state[0].grad_final, call.state[0].grad_final_run, h);
    if (call.cell == deepmemory::kLstm) load_state(call.state[1].grad_final, call.state[1].grad_final_run, c);
    walk(
        !call.reverse, [&](i64 low, i64 count) { begin_chunk(low, count); },
        [&](i64 t, i64 low) { backward_step(t, low); }, [&](i64 low, i64 count) { end_chunk(low, count); });
    if (call.grad_x)
      for (i64 t = longest; t < call.steps; t++) std::memset(grad_x_at(t), 0, sizeof(T) * rows * call.inputs);
    store_state(h, call.state[0].grad_start);
    if (call.cell == deepmemory::kLstm) store_state(c, call.state[1].grad_start);
  }
};

// The gradients of one map of one run, in torch's layout.
template <class T>
void write_gradients(const Plan& plan, i64 run, i64 linear, void* sums, i64 count) {
  const Linear& l = plan.linear[linear];
  const Maps<T> maps(plan);
  const i64 width = maps.width_of(l), columns = plan.weight_columns(l);
  T* all = static_cast<T*>(sums) + sums_before<T>(plan, linear);
  for (i64 group = 1; group < count; group++)
    add(maps.weight_sums(l) + maps.bias_sums(l), all + group * gradient_size<T>(plan), all);
  const i64 column_span = plan.lanes ? width : plan.span(width);
  T* weight = static_cast<T*>(plan.call.weight[l.weight].grad);
  T* bias = l.bias < 0 ? nullptr : static_cast<T*>(plan.call.weight[l.bias].grad);

  auto total = [&](i64 at) { return plan.lanes ? sum<T>(load<T>(all + at * lanes_of<T>)) : all[at]; };
  for (i64 s = 0; s < l.slots; s++)
    for (i64 j = 0; j < width; j++) {
      const i64 row = l.gate[s] * width + j, column = s * column_span + j;
      if (weight)
        for (i64 k = 0; k < l.in; k++) {
          const i64 at = plan.lanes ? column * l.in + k : k * columns + column;
          weight[(run * l.slots * width + row) * l.in + k] = total(at);
        }
      if (bias) bias[run * l.slots * width + row] = total(columns * l.in + column);
    }
}

template <class T>
constexpr deepmemory::Kernels kernels_of{
    [](const Plan& plan, i64 part) {
      return plan.extras ? Sweep<T, true>(plan, part).forward() : Sweep<T, false>(plan, part).forward();
    },
    [](const Plan& plan, i64 part, void* sums) {
      T* first = static_cast<T*>(sums);
      return plan.extras ? Sweep<T, true>(plan, part).backward(first) : Sweep<T, false>(plan, part).backward(first);
    },
    gradient_size<T>,
    write_gradients<T>,
};

}  // namespace

extern const deepmemory::Kernels kernels[2];
const deepmemory::Kernels kernels[2] = {kernels_of<float>, kernels_of<double>};

}  // namespace DM_LEVEL
