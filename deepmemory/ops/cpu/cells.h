// One step of each cell and the gradient of that step, for a tile of rows.
#pragma once

#include "panels.h"

namespace DM_LEVEL {

// Extras are masks and residuals: without them, their code is not compiled.
template <class T, bool Extras>
class Transition {
 public:
  using V = Vec<T>;
  using P = Panel<T>;
  using Const = Panel<const T>;

  const Plan& plan;
  const Maps<T>& maps;

  // Masks of the tile at hand, null where there are none, and room for one layer. Unused without Extras.
  P state_mask{}, hidden_mask{}, scratch{};

  Transition(const Plan& p, const Maps<T>& m) : plan(p), maps(m) {}

  // h and c become the state after the step. `projected` is what x gives to layer 0, biases included.
  // The record receives what the gradient needs.
  void forward(P h, P c, Const projected, P record) const {
    switch (plan.call.cell) {
      case deepmemory::kDmu: return dmu(h, projected, record);
      case deepmemory::kRhn: return rhn(h, projected, record);
      case deepmemory::kRnn: return rnn(h, projected, record);
      case deepmemory::kGru: return gru(h, projected, record);
      case deepmemory::kLstm: return lstm(h, c, projected, record);
    }
  }

  // dh and dc come as gradients with respect to the state after the step and leave as those before it.
  void backward(P dh, P dc, Const previous, Const record, P delta) const {
    switch (plan.call.cell) {
      case deepmemory::kDmu: return dmu_back(dh, previous, record, delta);
      case deepmemory::kRhn: return rhn_back(dh, previous, record, delta);
      case deepmemory::kRnn: return rnn_back(dh, record, delta);
      case deepmemory::kGru: return gru_back(dh, previous, record, delta);
      case deepmemory::kLstm: return lstm_back(dh, dc, record, delta);
    }
  }

  // What a map takes in, within a step's record or, where it is the state, in `previous`.
  Const input(const Linear& l, Const previous, Const record) const {
    if (l.layer == 0) return previous;
    const Layer& before = plan.layer[l.layer - 1];
    return record.from(plan.call.cell == deepmemory::kRhn ? before.aux : before.record);
  }

  // Whether the map into a layer sees anything but its input as it is.
  bool alters(i64 layer) const { return Extras && (mask_into(layer).at || adds(layer)); }

  // What the map into a layer sees of its input: the input times a mask, plus `below`, what the map before it saw, where
  // there are residuals. Written to `room`, unless it is the input as it is.
  Const seen(i64 layer, Const input, Const below, P room) const {
    if (!alters(layer)) return input;
    alter(layer, input, below, room);
    return fixed(room);
  }

 private:
  i64 state_span() const { return plan.span(plan.call.width); }

  // The first hidden layer, which feeds layer 1, has none before it to add to.
  bool adds(i64 layer) const { return plan.residual && layer >= 2; }

  Const mask_into(i64 layer) const {
    if (layer == 0 || plan.call.cell == deepmemory::kRhn) return fixed(state_mask);
    return hidden_mask.at ? fixed(hidden_mask.from(plan.layer[layer - 1].mask)) : nothing();
  }

  void alter(i64 layer, Const input, Const below, P room) const {
    const Const mask = mask_into(layer);
    const i64 span = plan.span(layer == 0 ? plan.call.width : plan.layer[layer - 1].width);
    if (!adds(layer))
      each(span, [&](i64 r, i64 j) { put(room, r, j, get(input, r, j) * get(mask, r, j)); });
    else if (!mask.at)
      each(span, [&](i64 r, i64 j) { put(room, r, j, get(below, r, j) + get(input, r, j)); });
    else
      each(span, [&](i64 r, i64 j) { put(room, r, j, get(below, r, j) + get(input, r, j) * get(mask, r, j)); });
  }

  template <class F>
  void each(i64 span, F f) const {
    const i64 outer = plan.lanes ? 1 : maps.rows;
    for (i64 r = 0; r < outer; r++)
      for (i64 j = 0; j < span; j += lanes_of<T>) f(r, j);
  }

  template <class A>
  static V get(Panel<A> p, i64 r, i64 j) {
    return load<T>(p.at + r * p.ld + j);
  }
  static void put(P p, i64 r, i64 j, V v) { store<T>(p.at + r * p.ld + j, v); }
  static Const fixed(P p) { return {p.at, p.ld}; }
  static Const nothing() { return {nullptr, 0}; }

  void linear(i64 layer, Const in, Const init, P record) const {
    maps.apply(layer + 1, in, init, record.from(plan.layer[layer].record), maps.rows);
  }
  void linear_back(i64 layer, P delta, Const init, P out) const {
    maps.apply_transposed(layer + 1, fixed(delta.from(plan.layer[layer].delta)), init, out, maps.rows);
  }

  // dh = init + the gradient through the map from the state into a layer; init is dh itself or nothing.
  void state_back(i64 layer, P delta, Const init, P dh) const {
    if (!Extras || !state_mask.at) return linear_back(layer, delta, init, dh);
    linear_back(layer, delta, nothing(), scratch);
    each(state_span(), [&](i64 r, i64 j) {
      V g = get(scratch, r, j) * get(state_mask, r, j);
      put(dh, r, j, init.at ? get(dh, r, j) + g : g);
    });
  }

  // The gradient of a hidden layer's activations, from the deltas of the layer above. With residuals the scratch holds
  // the gradient of what the map above saw, which is also part of the gradient of what the map below it saw.
  void hidden_back(i64 layer, P delta) const {
    P below = delta.from(plan.layer[layer].delta);
    if (!Extras || !(plan.residual || hidden_mask.at)) return linear_back(layer + 1, delta, nothing(), below);
    const i64 span = plan.span(plan.layer[layer].width);
    const Const mask = mask_into(layer + 1);
    P g = plan.residual ? scratch : below;
    linear_back(layer + 1, delta, plan.residual && layer + 2 < plan.layers ? fixed(g) : nothing(), g);
    if (mask.at)
      each(span, [&](i64 r, i64 j) { put(below, r, j, get(g, r, j) * get(mask, r, j)); });
    else
      each(span, [&](i64 r, i64 j) { put(below, r, j, get(g, r, j)); });
  }

  // Activations: in place; a slope that the output does not tell is kept in the slot behind it.

  void activate(const Layer& at, P record) const {
    const i64 span = plan.span(at.width);
    P out = record.from(at.record), slope = record.from(at.aux);
    switch (plan.call.activation) {
      case deepmemory::kLeakyRelu:
        each(span, [&](i64 r, i64 j) { V a = get(out, r, j); put(out, r, j, a > T(0) ? a : a * T(0.01)); });
        break;
      case deepmemory::kRelu:
        each(span, [&](i64 r, i64 j) { V a = get(out, r, j); put(out, r, j, a < T(0) ? V{} : a); });
        break;
      case deepmemory::kTanh:
        each(span, [&](i64 r, i64 j) { put(out, r, j, tanh<T>(get(out, r, j))); });
        break;
      case deepmemory::kSilu:
        each(span, [&](i64 r, i64 j) {
          V a = get(out, r, j);
          Gate<T> s(fold_sigmoid<T>(a));
          put(out, r, j, a * s.open);
          put(slope, r, j, s.open + a * s.slope);
        });
        break;
      case deepmemory::kGelu:
        each(span, [&](i64 r, i64 j) {
          V a = get(out, r, j), below = T(0.5) + T(0.5) * erf(a * T(0.70710678118654752440));
          put(out, r, j, a * below);
          put(slope, r, j, below + a * (T(0.39894228040143267794) * exp_negative<T>(T(-0.5) * a * a)));
        });
        break;
    }
  }

  void activate_back(const Layer& at, Const record, P delta) const {
    const i64 span = plan.span(at.width);
    Const out = record.from(at.record), slope = record.from(at.aux);
    switch (plan.call.activation) {
      case deepmemory::kLeakyRelu:
        each(span, [&](i64 r, i64 j) {
          V g = get(delta, r, j);
          put(delta, r, j, get(out, r, j) > T(0) ? g : g * T(0.01));
        });
        break;
      case deepmemory::kRelu:
        each(span, [&](i64 r, i64 j) { put(delta, r, j, get(out, r, j) <= T(0) ? V{} : get(delta, r, j)); });
        break;
      case deepmemory::kTanh:
        each(span, [&](i64 r, i64 j) {
          V a = get(out, r, j);
          put(delta, r, j, get(delta, r, j) * (T(1) - a * a));
        });
        break;
      default:
        each(span, [&](i64 r, i64 j) { put(delta, r, j, get(delta, r, j) * get(slope, r, j)); });
    }
  }

  // Deep memory update: slots z, candidate of the last layer.

  void dmu(P h, Const projected, P record) const {
    const i64 last = plan.layers - 1, span = state_span();
    Const in = seen(0, fixed(h), nothing(), scratch);
    linear(0, in, projected, record);
    for (i64 l = 1; l <= last; l++) {
      activate(plan.layer[l - 1], record);
      in = seen(l, fixed(record.from(plan.layer[l - 1].record)), in, scratch);
      linear(l, in, maps.bias(l), record);
    }
    P z = record.from(plan.layer[last].record), candidate = z.from(span);
    each(span, [&](i64 r, i64 j) {
      V folded = fold_sigmoid<T>(get(z, r, j)), n = tanh<T>(get(candidate, r, j));
      Gate<T> keep(folded);
      put(z, r, j, folded);
      put(candidate, r, j, n);
      put(h, r, j, get(h, r, j) * keep.open + n * keep.shut);
    });
  }

  void dmu_back(P dh, Const previous, Const record, P delta) const {
    const i64 last = plan.layers - 1, span = state_span();
    Const z = record.from(plan.layer[last].record), candidate = z.from(span);
    P dz = delta.from(plan.layer[last].delta), dn = dz.from(span);
    each(span, [&](i64 r, i64 j) {
      V g = get(dh, r, j), n = get(candidate, r, j);
      Gate<T> keep(get(z, r, j));
      put(dz, r, j, g * (get(previous, r, j) - n) * keep.slope);
      put(dn, r, j, g * keep.shut * (T(1) - n * n));
      put(dh, r, j, g * keep.open);
    });
    for (i64 l = last - 1; l >= 0; l--) {
      hidden_back(l, delta);
      activate_back(plan.layer[l], record, delta.from(plan.layer[l].delta));
    }
    state_back(0, delta, fixed(dh), dh);
  }

  // Recurrent highway: slots candidate, transform of every layer; its state is kept for the next.

  void rhn(P h, Const projected, P record) const {
    const i64 span = state_span();
    for (i64 l = 0; l < plan.layers; l++) {
      const Layer& at = plan.layer[l];
      linear(l, seen(l, fixed(h), nothing(), scratch), l == 0 ? projected : maps.bias(l), record);
      P candidate = record.from(at.record), transform = candidate.from(span), after = record.from(at.aux);
      const bool inner = l + 1 < plan.layers;
      each(span, [&](i64 r, i64 j) {
        V folded = fold_sigmoid<T>(get(transform, r, j)), n = tanh<T>(get(candidate, r, j));
        Gate<T> take(folded);
        put(transform, r, j, folded);
        put(candidate, r, j, n);
        V s = n * take.open + get(h, r, j) * take.shut;
        put(h, r, j, s);
        if (inner) put(after, r, j, s);
      });
    }
  }

  void rhn_back(P dh, Const previous, Const record, P delta) const {
    const i64 span = state_span();
    for (i64 l = plan.layers - 1; l >= 0; l--) {
      const Layer& at = plan.layer[l];
      Const candidate = record.from(at.record), transform = candidate.from(span);
      Const before = l == 0 ? previous : record.from(plan.layer[l - 1].aux);
      P dn = delta.from(at.delta), dt = dn.from(span);
      each(span, [&](i64 r, i64 j) {
        V g = get(dh, r, j), n = get(candidate, r, j);
        Gate<T> take(get(transform, r, j));
        put(dn, r, j, g * take.open * (T(1) - n * n));
        put(dt, r, j, g * (n - get(before, r, j)) * take.slope);
        put(dh, r, j, g * take.shut);
      });
      state_back(l, delta, fixed(dh), dh);
    }
  }

  void rnn(P h, Const projected, P record) const {
    linear(0, seen(0, fixed(h), nothing(), scratch), projected, record);
    activate(plan.layer[0], record);
    P out = record.from(plan.layer[0].record);
    each(state_span(), [&](i64 r, i64 j) { put(h, r, j, get(out, r, j)); });
  }

  void rnn_back(P dh, Const record, P delta) const {
    each(state_span(), [&](i64 r, i64 j) { put(delta, r, j, get(dh, r, j)); });
    activate_back(plan.layer[0], record, delta);
    state_back(0, delta, nothing(), dh);
  }

  // Gated recurrent unit: slots n_x, r, z, n_h.

  void gru(P h, Const projected, P record) const {
    const i64 span = state_span();
    linear(0, seen(0, fixed(h), nothing(), scratch), projected, record);
    P n_x = record.from(plan.layer[0].record), reset = n_x.from(span), z = reset.from(span), n_h = z.from(span);
    each(span, [&](i64 r, i64 j) {
      V folded_r = fold_sigmoid<T>(get(reset, r, j)), folded_z = fold_sigmoid<T>(get(z, r, j));
      Gate<T> open(folded_r), keep(folded_z);
      V n = tanh<T>(get(projected, r, j) + open.open * get(n_h, r, j));  // n_x stands first in both
      put(n_x, r, j, n);
      put(reset, r, j, folded_r);
      put(z, r, j, folded_z);
      put(h, r, j, get(h, r, j) * keep.open + n * keep.shut);
    });
  }

  void gru_back(P dh, Const previous, Const record, P delta) const {
    const i64 span = state_span();
    Const n_x = record.from(plan.layer[0].record), reset = n_x.from(span), z = reset.from(span), n_h = z.from(span);
    P dn_x = delta, dr = dn_x.from(span), dz = dr.from(span), dn_h = dz.from(span);
    each(span, [&](i64 r, i64 j) {
      V g = get(dh, r, j), n = get(n_x, r, j);
      Gate<T> open(get(reset, r, j)), keep(get(z, r, j));
      V dn = g * keep.shut * (T(1) - n * n);
      put(dn_x, r, j, dn);
      put(dr, r, j, dn * get(n_h, r, j) * open.slope);
      put(dz, r, j, g * (get(previous, r, j) - n) * keep.slope);
      put(dn_h, r, j, dn * open.open);
      put(dh, r, j, g * keep.open);
    });
    state_back(0, delta, fixed(dh), dh);
  }

  // Long short-term memory: slots i, f, g, o; kept beside them c before the step, tanh(c) after it.

  void lstm(P h, P c, Const projected, P record) const {
    const i64 span = state_span();
    linear(0, seen(0, fixed(h), nothing(), scratch), projected, record);
    P i = record.from(plan.layer[0].record), f = i.from(span), g = f.from(span), o = g.from(span);
    P c_before = record.from(plan.layer[0].aux), c_tanh = c_before.from(span);
    each(span, [&](i64 r, i64 j) {
      V folded_i = fold_sigmoid<T>(get(i, r, j)), folded_f = fold_sigmoid<T>(get(f, r, j));
      V folded_o = fold_sigmoid<T>(get(o, r, j)), update = tanh<T>(get(g, r, j)), old = get(c, r, j);
      V now = Gate<T>(folded_f).open * old + Gate<T>(folded_i).open * update, squashed = tanh<T>(now);
      put(i, r, j, folded_i);
      put(f, r, j, folded_f);
      put(g, r, j, update);
      put(o, r, j, folded_o);
      put(c_before, r, j, old);
      put(c_tanh, r, j, squashed);
      put(c, r, j, now);
      put(h, r, j, Gate<T>(folded_o).open * squashed);
    });
  }

  void lstm_back(P dh, P dc, Const record, P delta) const {
    const i64 span = state_span();
    Const i = record.from(plan.layer[0].record), f = i.from(span), g = f.from(span), o = g.from(span);
    Const c_before = record.from(plan.layer[0].aux), c_tanh = c_before.from(span);
    P di = delta, df = di.from(span), dg = df.from(span), d_o = dg.from(span);
    each(span, [&](i64 r, i64 j) {
      V grad = get(dh, r, j), squashed = get(c_tanh, r, j), update = get(g, r, j);
      Gate<T> in(get(i, r, j)), forget(get(f, r, j)), out(get(o, r, j));
      V total = get(dc, r, j) + grad * out.open * (T(1) - squashed * squashed);
      put(di, r, j, total * update * in.slope);
      put(df, r, j, total * get(c_before, r, j) * forget.slope);
      put(dg, r, j, total * in.open * (T(1) - update * update));
      put(d_o, r, j, grad * squashed * out.slope);
      put(dc, r, j, total * forget.open);
    });
    state_back(0, delta, nothing(), dh);
  }
};

}  // namespace DM_LEVEL
