// Panels: the small matrices a tile of rows lives in, and the linear maps between them.
//
// Both strategies store a slot as rows of contiguous elements that a vector loop can run through without
// knowing what a lane means: [row][feature], `rows` of them, or [feature][lane], one long row.
#pragma once

#include <cstring>

#include "gemm.h"
#include "plan.h"

namespace DM_LEVEL {

using deepmemory::Call;
using deepmemory::kLanes;
using deepmemory::Layer;
using deepmemory::Linear;
using deepmemory::Plan;

template <class T>
struct Panel {
  T* at;
  i64 ld;  // from one row to the next, or from one feature to the next in lanes

  Panel from(i64 offset) const { return {at + offset, ld}; }
};

// Hands out pieces of one block. With no block it only counts, so that the same code sizes and binds.
struct Arena {
  char* block = nullptr;
  i64 used = 0;

  template <class U>
  U* take(i64 count) {
    U* at = block ? reinterpret_cast<U*>(block + used) : nullptr;
    used += (count * i64(sizeof(U)) + 63) / 64 * 64;
    return at;
  }
};

// The linear maps of one run, packed for the tiles of gemm.h.
template <class T>
class Maps {
 public:
  const Plan& plan;
  i64 rows = 0;  // of the tile at hand

  explicit Maps(const Plan& p) : plan(p) {}

  i64 width_of(const Linear& l) const { return plan.layer[l.layer].width; }
  i64 delta_offset(const Linear& l) const { return plan.layer[l.layer].delta + l.first_slot * plan.span(width_of(l)); }
  i64 outputs(const Linear& l) const { return l.slots * width_of(l); }

  static i64 whole_panels(i64 columns) { return (columns + panel_width<T> - 1) / panel_width<T> * panel_width<T>; }

  i64 packed_size(const Linear& l, bool transposed) const {
    if (plan.lanes) return outputs(l) * l.in;
    return transposed ? whole_panels(plan.padded(l.in)) * outputs(l) : whole_panels(plan.weight_columns(l)) * l.in;
  }

  void bind(Arena& arena, bool transposed) {
    packed_ = arena.take<T*>(plan.linears);
    for (i64 i = 0; i < plan.linears; i++) {
      T* at = arena.take<T>(packed_size(plan.linear[i], transposed));
      if (packed_) packed_[i] = at;
    }
    if (transposed) return;
    bias_ = arena.take<T*>(plan.layers);
    for (i64 l = 0; l < plan.layers; l++) {
      T* at = arena.take<T>(plan.layer[l].slots * plan.span(plan.layer[l].width));
      if (bias_) bias_[l] = at;
    }
  }

  void pack(i64 run, bool transposed) {
    for (i64 i = 0; i < plan.linears; i++) pack_weight(plan.linear[i], run, transposed, packed_[i]);
    if (transposed) return;
    for (i64 l = 0; l < plan.layers; l++)
      std::memset(bias_[l], 0, sizeof(T) * plan.layer[l].slots * plan.span(plan.layer[l].width));
    for (i64 i = 0; i < plan.linears; i++) add_bias(plan.linear[i], run, bias_[plan.linear[i].layer]);
  }

  // The biases of a layer's slots, to start its sums from.
  Panel<const T> bias(i64 layer) const { return {bias_[layer], plan.lanes ? kLanes : 0}; }

  // out = init + map(in) for `count` rows; out and init start at the layer's first slot.
  void apply(i64 i, Panel<const T> in, Panel<const T> init, Panel<T> out, i64 count) const {
    const Linear& l = plan.linear[i];
    const i64 skip = l.first_slot * plan.span(width_of(l)), columns = plan.weight_columns(l);
    if (plan.lanes)
      gemm<T, false>(columns, kLanes, l.in, packed_[i], l.in, {in.at, panel_width<T>, in.ld}, init.at + skip, init.ld,
                     out.at + skip, out.ld);
    else
      gemm<T, false>(count, columns, l.in, in.at, in.ld, {packed_[i], l.in * panel_width<T>, panel_width<T>},
                     init.at + skip, init.ld, out.at + skip, out.ld);
  }

  // out = init + transposed map(delta); delta starts at the layer's first slot. Slot by slot, as padding between them
  // must not be read: what stands there may be NaN, and a weight of zero would not hide it.
  void apply_transposed(i64 i, Panel<const T> delta, Panel<const T> init, Panel<T> out, i64 count) const {
    const Linear& l = plan.linear[i];
    const i64 width = width_of(l), span = plan.span(width), skip = l.first_slot * span;
    if (plan.lanes)
      gemm<T, true>(l.in, kLanes, outputs(l), packed_[i], l.in, {delta.at + skip, panel_width<T>, delta.ld}, init.at,
                    init.ld, out.at, out.ld);
    else
      for (i64 s = 0; s < l.slots; s++, init = {out.at, out.ld})
        gemm<T, false>(count, plan.padded(l.in), width, delta.at + skip + s * span, delta.ld,
                       {packed_[i] + s * width * panel_width<T>, outputs(l) * panel_width<T>, panel_width<T>}, init.at,
                       init.ld, out.at, out.ld);
  }

  // Sums of a map's weight gradient: [in][slot, feature], or in lanes [slot, feature][in][vector]; then its bias.
  i64 weight_sums(const Linear& l) const {
    return plan.weight_columns(l) * l.in * (plan.lanes ? lanes_of<T> : 1);
  }
  i64 bias_sums(const Linear& l) const { return plan.weight_columns(l) * (plan.lanes ? lanes_of<T> : 1); }

  // sums += delta x in over `steps` of a chunk, both at its first step and a fixed distance per step.
  void add_gradient(const Linear& l, Panel<const T> in, i64 in_step, Panel<const T> delta, i64 delta_step, i64 steps,
                    T* sums) const {
    const T* d = delta.at + delta_offset(l);
    const i64 columns = plan.weight_columns(l);
    if (plan.lanes)
      dot<T>(columns, l.in, steps, kLanes, d, delta_step, in.at, in_step, sums);
    else
      gemm<T, true>(l.in, columns, steps * rows, in.at, in.ld, {d, panel_width<T>, delta.ld}, sums, columns, sums,
                    columns);
  }

  void add_bias_gradient(const Linear& l, Panel<const T> delta, i64 delta_step, i64 steps, T* sums) const {
    constexpr i64 W = lanes_of<T>;
    const T* d = delta.at + delta_offset(l);
    const i64 columns = plan.weight_columns(l);
    if (plan.lanes) {
      for (i64 f = 0; f < columns; f++) {
        Vec<T> total = load<T>(sums + f * W);
        for (i64 t = 0; t < steps; t++)
          for (i64 lane = 0; lane < kLanes; lane += W) total += load<T>(d + t * delta_step + f * kLanes + lane);
        store<T>(sums + f * W, total);
      }
    } else {
      for (i64 f = 0; f < columns; f += W) {
        Vec<T> total = load<T>(sums + f);
        for (i64 r = 0; r < steps * rows; r++) total += load<T>(d + r * delta.ld + f);
        store<T>(sums + f, total);
      }
    }
  }

 private:
  T** packed_ = nullptr;
  T** bias_ = nullptr;

  const T* value(i64 weight, i64 run) const {
    const Call::Weight& w = plan.call.weight[weight];
    return static_cast<const T*>(w.value) + run * w.run;
  }

  void pack_weight(const Linear& l, i64 run, bool transposed, T* out) const {
    constexpr i64 P = panel_width<T>;
    const i64 width = width_of(l), span = plan.span(width);
    const T* w = value(l.weight, run);
    if (!plan.lanes) std::memset(out, 0, sizeof(T) * packed_size(l, transposed));
    for (i64 s = 0; s < l.slots; s++)
      for (i64 j = 0; j < width; j++) {
        const T* row = w + (l.gate[s] * width + j) * l.in;
        const i64 output = s * width + j, f = s * span + j;
        if (plan.lanes) {
          std::memcpy(out + output * l.in, row, sizeof(T) * l.in);
        } else if (transposed) {
          for (i64 k = 0; k < l.in; k++) out[(k / P * outputs(l) + output) * P + k % P] = row[k];
        } else {
          T* column = out + f / P * l.in * P + f % P;
          for (i64 k = 0; k < l.in; k++) column[k * P] = row[k];
        }
      }
  }

  void add_bias(const Linear& l, i64 run, T* out) const {
    if (l.bias < 0) return;
    const i64 width = width_of(l), span = plan.span(width);
    const T* b = value(l.bias, run);
    for (i64 s = 0; s < l.slots; s++)
      for (i64 j = 0; j < width; j++) {
        T* slot = out + (l.first_slot + s) * span;
        const T v = b[l.gate[s] * width + j];
        if (plan.lanes)
          for (i64 lane = 0; lane < kLanes; lane++) slot[j * kLanes + lane] += v;
        else
          slot[j] += v;
      }
  }
};

}  // namespace DM_LEVEL
