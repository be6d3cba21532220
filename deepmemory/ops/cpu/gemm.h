// The two small matrix products everything else is made of. Both keep a tile of results in registers.
#pragma once

#include "simd.h"

namespace DM_LEVEL {

// Results held at once: kTileRows x kTileVectors vectors, what the register file takes beside the operands.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVectors = 2, kDotTile = 4;
#elif defined(__aarch64__)
constexpr int kTileRows = 8, kTileVectors = 2, kDotTile = 4;
#else
constexpr int kTileRows = 6, kTileVectors = 2, kDotTile = 3;
#endif

// Clang leaves large tiles in memory unless it is told to unroll their loops; GCC unrolls them by itself.
#ifdef __clang__
#define DM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define DM_UNROLL
#endif

template <class T>
constexpr i64 panel_width = kTileVectors * lanes_of<T>;

// Where the right operand's columns lie: panel j starts at `at + j * panel`, its rows are `ld` apart.
template <class T>
struct Right {
  const T* at;
  i64 panel, ld;
};

template <class T, int Rows, int Vectors, bool Across>
void tile(i64 depth, const T* left, i64 stride, const T* right, i64 ld, const T* init, i64 init_ld, T* out,
          i64 out_ld) {
  constexpr int W = lanes_of<T>;
  Vec<T> acc[Rows][Vectors];
  DM_UNROLL for (int i = 0; i < Rows; i++)
    for (int v = 0; v < Vectors; v++) acc[i][v] = init ? load<T>(init + i * init_ld + v * W) : Vec<T>{};
  for (i64 k = 0; k < depth; k++) {
    Vec<T> r[Vectors];
    for (int v = 0; v < Vectors; v++) r[v] = load<T>(right + k * ld + v * W);
    DM_UNROLL for (int i = 0; i < Rows; i++) {
      Vec<T> l = splat<T>(Across ? left[k * stride + i] : left[i * stride + k]);
      for (int v = 0; v < Vectors; v++) acc[i][v] += l * r[v];
    }
  }
  DM_UNROLL for (int i = 0; i < Rows; i++)
    for (int v = 0; v < Vectors; v++) store<T>(out + i * out_ld + v * W, acc[i][v]);
}

template <class T>
using TileFunction = void (*)(i64, const T*, i64, const T*, i64, const T*, i64, T*, i64);

template <class T, bool Across, int Vectors, int Rows = kTileRows>
constexpr TileFunction<T> pick_tile(int rows) {
  if constexpr (Rows == 0)
    return nullptr;
  else
    return rows == Rows ? tile<T, Rows, Vectors, Across> : pick_tile<T, Across, Vectors, Rows - 1>(rows);
}

template <class T, bool Across>
struct Tiles {
  TileFunction<T> of[kTileVectors + 1][kTileRows + 1] = {};
  constexpr Tiles() {
    for (int rows = 1; rows <= kTileRows; rows++) {
      of[1][rows] = pick_tile<T, Across, 1>(rows);
      of[2][rows] = pick_tile<T, Across, 2>(rows);
    }
  }
};

// out[i, j] = init[i, j] + sum_k left(i, k) * right[k, j] for j in `columns` (a multiple of the vector).
// left(i, k) is left[i * stride + k], or left[k * stride + i] if Across. `init` may be null or out itself;
// init_ld = 0 adds the same row everywhere.
template <class T, bool Across>
void gemm(i64 rows, i64 columns, i64 depth, const T* left, i64 stride, Right<T> right, const T* init, i64 init_ld,
          T* out, i64 out_ld) {
  static constexpr Tiles<T, Across> tiles;
  const i64 passes = (rows + kTileRows - 1) / kTileRows;
  for (i64 column = 0, j = 0; column < columns; column += panel_width<T>, j++) {
    const i64 left_over = (columns - column) / lanes_of<T>;
    const i64 vectors = left_over < kTileVectors ? left_over : kTileVectors;
    const T* panel = right.at + j * right.panel;
    for (i64 pass = 0, row = 0; pass < passes; pass++) {  // tiles of equal height, so that none is thin
      const i64 next = rows * (pass + 1) / passes;
      tiles.of[vectors][next - row](depth, left + row * (Across ? 1 : stride), stride, panel, right.ld,
                                    init ? init + row * init_ld + column : nullptr, init_ld,
                                    out + row * out_ld + column, out_ld);
      row = next;
    }
  }
}

template <class T, int Rows, int Columns>
void dot_tile(i64 steps, i64 lanes, const T* left, i64 left_step, const T* right, i64 right_step, T* out, i64 out_ld) {
  constexpr int W = lanes_of<T>;
  Vec<T> acc[Rows][Columns];
  DM_UNROLL for (int i = 0; i < Rows; i++)
    for (int j = 0; j < Columns; j++) acc[i][j] = load<T>(out + (i * out_ld + j) * W);
  for (i64 t = 0; t < steps; t++)
    for (i64 lane = 0; lane < lanes; lane += W) {
      const T *l = left + t * left_step + lane, *r = right + t * right_step + lane;
      Vec<T> rv[Columns];
      for (int j = 0; j < Columns; j++) rv[j] = load<T>(r + j * lanes);
      DM_UNROLL for (int i = 0; i < Rows; i++) {
        Vec<T> lv = load<T>(l + i * lanes);
        for (int j = 0; j < Columns; j++) acc[i][j] += lv * rv[j];
      }
    }
  DM_UNROLL for (int i = 0; i < Rows; i++)
    for (int j = 0; j < Columns; j++) store<T>(out + (i * out_ld + j) * W, acc[i][j]);
}

template <class T, int Rows>
inline void dot_row(i64 columns, i64 steps, i64 lanes, const T* left, i64 left_step, const T* right, i64 right_step,
                    T* out) {
  i64 j = 0;
  for (; j + kDotTile <= columns; j += kDotTile)
    dot_tile<T, Rows, kDotTile>(steps, lanes, left, left_step, right + j * lanes, right_step,
                                out + j * lanes_of<T>, columns);
  for (; j < columns; j++)
    dot_tile<T, Rows, 1>(steps, lanes, left, left_step, right + j * lanes, right_step, out + j * lanes_of<T>, columns);
}

// out[i, j] += sum_t left[t][i] * right[t][j], lane by lane: left and right are [feature][lane] at every step,
// out holds one vector of partial sums per (i, j).
template <class T>
void dot(i64 rows, i64 columns, i64 steps, i64 lanes, const T* left, i64 left_step, const T* right, i64 right_step,
         T* out) {
  i64 i = 0;
  for (; i + kDotTile <= rows; i += kDotTile)
    dot_row<T, kDotTile>(columns, steps, lanes, left + i * lanes, left_step, right, right_step,
                         out + i * columns * lanes_of<T>);
  for (; i < rows; i++)
    dot_row<T, 1>(columns, steps, lanes, left + i * lanes, left_step, right, right_step,
                  out + i * columns * lanes_of<T>);
}

}  // namespace DM_LEVEL
