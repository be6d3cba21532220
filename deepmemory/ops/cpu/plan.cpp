#include "plan.h"

#include <algorithm>

namespace deepmemory {

namespace {

// Up to this width of state and hidden layers the batch goes in lanes: measured equal at 28 to 40 on AVX2 and AVX-512.
constexpr i64 kLanesUpTo = 28;
constexpr i64 kFewRows = 8;  // below this most lanes would be empty
constexpr i64 kRowsPerTile = 32;    // rows that share one load of the weights
constexpr i64 kRowsPerChunk = 128;  // rows of a product over time: its panels fit the first-level cache
constexpr i64 kStepsPerLaneChunk = 16;
constexpr i64 kWorkPerThread = 2500000;  // multiply-adds below which another thread costs more than it gives
// A run has no use for more threads than groups. Smaller groups cost up to 3 % where a thread has several of them.
constexpr i64 kGroups = 8, kMostGroups = 16;
constexpr i64 kRowsPerGroup = 4, kRowsOfManyWeights = 8, kRowsOfManyGroups = 16;  // at least
constexpr i64 kManyWeights = 1 << 17;    // more of them do not stay in the second-level cache
constexpr i64 kMostSums = i64(1) << 28;  // elements of a run's sums, each of which is as large as its weights

bool keeps_slope(i64 activation) { return activation == kSilu || activation == kGelu; }

// Strides that are an odd number of 64-byte lines do not collide in the cache.
i64 odd_lines(i64 elements) { return elements / kLanes % 2 ? elements : elements + kLanes; }

}  // namespace

Plan::Plan(const Call& c) : call(c) {
  const i64 d = c.width, per_layer = c.bias ? 2 : 1;
  const bool chain = c.cell == kDmu || c.cell == kRhn;  // cells of any depth
  const i64 depth = chain ? 1 + (c.weights - 1 - per_layer) / per_layer : 1;
  auto weight_of = [&](i64 l) { return l == 0 ? 0 : 1 + l * per_layer; };

  widest = d;
  for (i64 l = 0; l < depth; l++) {
    Layer at{d, 2, 0, 0, 0, 0};
    if (c.cell == kDmu && l + 1 < depth) at = {c.weight[weight_of(l)].rows, 1, 0, 0, 0, 0};
    if (c.cell == kRnn) at.slots = 1;
    if (c.cell == kGru || c.cell == kLstm) at.slots = 4;
    layer_list.push_back(at);
    widest = std::max(widest, at.width);
  }
  // A trace's size must not depend on the batch in steps, so only a call without one looks at it.
  lanes = widest <= kLanesUpTo && (c.trace || c.batch >= kFewRows);

  Linear from_x{0, c.inputs, layer_list[0].slots, 0, {0, 1, 2, 3}, 0, c.bias ? 2 : -1};
  Linear from_h{0, d, layer_list[0].slots, 0, {0, 1, 2, 3}, 1, c.bias && !chain ? 3 : -1};
  if (c.cell == kGru) {
    // Slots n_x, r, z, n_h: x feeds the first three, h the last three. torch's rows are r, z, n.
    from_x = {0, c.inputs, 3, 0, {2, 0, 1, 0}, 0, c.bias ? 2 : -1};
    from_h = {0, d, 3, 1, {0, 1, 2, 0}, 1, c.bias ? 3 : -1};
  }
  linear_list = {from_x, from_h};
  for (i64 l = 1; l < depth; l++) {
    const i64 w = weight_of(l);
    linear_list.push_back({l, layer_list[l - 1].width, layer_list[l].slots, 0, {0, 1, 2, 3}, w, c.bias ? w + 1 : -1});
  }

  layer = layer_list.data();
  linear = linear_list.data();
  layers = depth;
  linears = i64(linear_list.size());
  residual = c.residual && c.cell == kDmu && depth > 2;
  extras = residual || c.state_mask || c.hidden_mask || c.resets;

  previous = 0;
  record = lanes ? span(d) : 0;
  delta = mask = 0;
  for (i64 l = 0; l < depth; l++) {
    Layer& at = layer_list[l];
    const bool hidden = c.cell == kDmu && l + 1 < depth;
    i64 kept = 0;  // slots beside the layer's own
    if (c.cell == kLstm) kept = 2;
    if (c.cell == kRhn && l + 1 < depth) kept = 1;
    if ((hidden || c.cell == kRnn) && keeps_slope(c.activation)) kept = 1;
    at.record = record;
    at.aux = record + at.slots * span(at.width);
    record = at.aux + kept * span(at.width);
    at.delta = delta;
    delta += at.slots * span(at.width);
    at.mask = mask;
    if (hidden) mask += span(at.width);
  }
  const i64 used = record;
  if (!lanes) {
    record = odd_lines(record);
    delta = odd_lines(delta);
  }
  unused = record - used;
}

void Plan::share() {
  const Call& c = call;
  i64 weights = 0;  // and multiply-adds of one row and step
  for (const Linear& l : linear_list) weights += l.in * l.slots * layer[l.layer].width;
  // The gates' exponentials count too: they dominate small states.
  const double work = double(c.steps) * double(c.batch) * double(weights + 40 * c.width);  // of one run
  auto threads_for = [](double w, i64 most) {
    return std::clamp<i64>(i64(std::min(w / kWorkPerThread, 1e6)), 1, most);
  };

  // Tiles and groups follow from the shape of a run alone: no last bit depends on the threads or on other runs.
  const i64 fewest_rows = weights > kManyWeights ? kRowsOfManyWeights : kRowsPerGroup;
  groups = std::min({c.batch / fewest_rows, std::max(kGroups, c.batch / kRowsOfManyGroups), kMostGroups,
                     c.steps * c.batch / kRowsPerChunk, kMostSums / std::max<i64>(1, weights)});
  groups = threads_for(work, std::max<i64>(1, groups));
  const i64 group_rows = std::max<i64>(1, (c.batch + groups - 1) / groups);
  const i64 tiles_in_group = (group_rows + kRowsPerTile - 1) / kRowsPerTile;
  tile_rows = lanes ? kLanes : (group_rows + tiles_in_group - 1) / tiles_in_group;
  tiles = (c.batch + tile_rows - 1) / tile_rows;
  groups = std::max<i64>(1, std::min(groups, tiles));

  // Whole runs per thread where that balances; otherwise every run is cut for all threads.
  const i64 threads = threads_for(double(c.runs) * work, std::max<i64>(1, c.threads));
  parts = c.runs % threads == 0 || c.runs >= 4 * threads ? 1 : std::min(threads, groups);
  chunk = lanes ? kStepsPerLaneChunk : std::max<i64>(1, kRowsPerChunk / tile_rows);
  chunk = std::max<i64>(1, std::min(chunk, c.steps));
}

}  // namespace deepmemory
