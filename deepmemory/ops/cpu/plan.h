// What is to be computed (Call) and how (Plan), the same for every instruction-set level.
#pragma once

#include <cstdint>
#include <vector>

namespace deepmemory {

using i64 = int64_t;

enum Cell : i64 { kDmu, kRhn, kRnn, kGru, kLstm };
enum Activation : i64 { kLeakyRelu, kRelu, kTanh, kSilu, kGelu };

// Lanes of a tile, and what widths are padded to: both a multiple of every vector, so that a trace means the
// same at every level.
constexpr i64 kLanes = 16;
// Elements in front of the records, unused: torch keeps the size of a trace in compiled graphs on disk, so it stays.
constexpr i64 kTraceHeader = 16;

// One layer in one direction over R runs. Written by deepmemory/ops/cpu/__init__.py as a row of int64.
// Strides count elements; whatever has only a stride of runs is contiguous within a run.
struct Call {
  struct State {
    const void* start;  // (R, B, d)
    i64 start_run;
    void* final;             // (R, B, d), forward
    const void* grad_final;  // (R, B, d), backward; null where none comes
    i64 grad_final_run;
    void* grad_start;  // (R, B, d) or null, backward
  };
  struct Weight {
    const void* value;  // (R, rows, columns) or (R, rows)
    i64 run;
    void* grad;  // contiguous, or null where nobody asks
    i64 rows;
  };

  i64 is_double, cell, activation, bias, reverse, residual;
  i64 runs, steps, batch, inputs, width, threads;
  const void* x;  // (R, T, B, m)
  i64 x_run, x_step, x_row, x_feature;
  const i64* lengths;  // (R, B) or null
  i64 lengths_run;
  const uint8_t* resets;  // (R, T, B) or null: where the state is zero before the step
  i64 resets_run;
  const void* state_mask;  // (R, B, d) or null: factors of the state as weights see it
  i64 state_mask_run;
  const void* hidden_mask;  // (R, B, sum of hidden widths) or null: factors of a dmu's hidden layers
  i64 hidden_mask_run;
  void* y;      // (R, T, B, d)
  void* trace;  // null if nothing is to be saved
  const void* grad_y;  // (R, T, B, d) or null
  i64 gy_run, gy_step, gy_row, gy_feature;
  void* grad_x;  // (R, T, B, m) contiguous, or null
  State state[2];
  i64 weights;
  Weight weight[1];  // `weights` of them, in the order of recurrence.py
};
static_assert(sizeof(void*) == 8, "the call is a row of 64-bit values");

// A transition is a chain of layers. Layer 0 takes x and h, each through a linear map of its own; every later
// one takes the layer before. Outputs come in slots of equal width, one per gate.
struct Layer {
  i64 width, slots;
  i64 record, aux;  // offsets in the record of a step: slots in order, then what the cell keeps beside them
  i64 delta;        // offset in the record of gradients with respect to the slots
  i64 mask;         // offset in the masks of the hidden layers
};

struct Linear {
  i64 layer, in, slots, first_slot;  // feeds slots first_slot ... of the layer
  i64 gate[4];                       // which block of the weight's rows each slot takes
  i64 weight, bias;                  // indices in Call::weight; bias is -1 where there is none
};

struct Plan {
  const Call& call;
  // Lanes: a vector holds one feature of several sequences, panels are [feature][lane], for small states.
  // Otherwise a vector holds several features of one sequence, panels are [row][feature].
  bool lanes;
  std::vector<Layer> layer_list;
  std::vector<Linear> linear_list;  // x, h, then the deeper layers'
  const Layer* layer;               // the same, for kernels: they must not touch std templates
  const Linear* linear;
  i64 layers, linears;
  i64 record, delta;  // elements per row and step (per tile and step in lanes)
  i64 unused;         // of them at the end of a record
  i64 previous;       // offset of the state before the step in a record of lanes
  i64 widest;         // of the state and the layers
  i64 mask;           // elements per row (per tile in lanes) of the masks of all hidden layers
  bool residual;      // whether some hidden layer adds to the one before
  bool extras;        // whether there are masks, residuals or resets
  // Of one run: rows go in tiles, tiles in groups, groups in parts. The weight gradients of a group are one sum, a
  // part goes to one thread.
  i64 tile_rows, tiles, groups, parts;
  i64 chunk;  // steps between two rounds of products over many rows

  explicit Plan(const Call& call);
  void share();  // cuts the batch

  i64 padded(i64 width) const { return (width + kLanes - 1) / kLanes * kLanes; }
  i64 span(i64 width) const { return lanes ? width * kLanes : padded(width); }  // elements of one slot
  i64 first_tile(i64 group) const { return tiles * group / groups; }
  i64 first_group(i64 part) const { return groups * part / parts; }
  i64 weight_columns(const Linear& l) const {  // a map's outputs, padded where features are
    return l.slots * (lanes ? layer[l.layer].width : span(layer[l.layer].width));
  }
};

// The kernels of one level. Each returns false if memory ran out.
struct Kernels {
  bool (*forward)(const Plan&, i64 part);
  // Leaves the sum of each of the part's groups in `sums`, gradient_size elements apart. Where a run is one part, the
  // first becomes their total and there is room for two.
  bool (*backward)(const Plan&, i64 part, void* sums);
  i64 (*gradient_size)(const Plan&);
  // Adds up `count` sums in their order and writes the gradients of one map.
  void (*write_gradients)(const Plan&, i64 run, i64 linear, void* sums, i64 count);
};

// Indexed by is_double.
namespace baseline {
extern const Kernels kernels[2];
}
#ifdef DM_X86
namespace avx2 {
extern const Kernels kernels[2];
}
namespace avx512 {
extern const Kernels kernels[2];
}
#endif

}  // namespace deepmemory
