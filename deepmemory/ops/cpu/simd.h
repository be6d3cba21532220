// Vectors of one instruction-set level, and the functions the cells apply to them.
//
// GCC/Clang vector extensions throughout: the same source serves SSE2, AVX2, AVX-512 and NEON. Each level
// compiles it into a namespace of its own (DM_LEVEL), so that no linker can mix their inline functions.
#pragma once

#include <cmath>
#include <cstdint>

namespace DM_LEVEL {

using i64 = int64_t;

template <class T>
struct Simd;

template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(DM_VECTOR_BYTES)));
  typedef int32_t I __attribute__((vector_size(DM_VECTOR_BYTES)));
  typedef float Memory __attribute__((vector_size(DM_VECTOR_BYTES), aligned(4), may_alias));
  static constexpr int32_t sign = INT32_MIN;
  static constexpr int mantissa = 23, exponent_bias = 127;
  static constexpr float round_magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float log2e = 1.44269504088896341f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr float exp_floor = -87.f;
  // exp(r) = 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2 (Cephes)
  static constexpr int terms = 6;
  static constexpr float polynomial[terms] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                              4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(DM_VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(DM_VECTOR_BYTES)));
  typedef double Memory __attribute__((vector_size(DM_VECTOR_BYTES), aligned(8), may_alias));
  static constexpr int64_t sign = INT64_MIN;
  static constexpr int mantissa = 52, exponent_bias = 1023;
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double log2e = 1.44269504088896338700, ln2_high = 6.93147180369123816490e-01,
                          ln2_low = 1.90821492927058770002e-10;
  static constexpr double exp_floor = -708.0;
  static constexpr int terms = 12;  // Taylor: the next term is below 1e-17
  static constexpr double polynomial[terms] = {1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0,
                                               1 / 362880.0,     1 / 40320.0,     1 / 5040.0,     1 / 720.0,
                                               1 / 120.0,        1 / 24.0,        1 / 6.0,        1 / 2.0};
};

template <class T>
constexpr int lanes_of = DM_VECTOR_BYTES / int(sizeof(T));

template <class T>
using Vec = typename Simd<T>::V;

template <class T>
inline Vec<T> load(const T* at) {
  return *reinterpret_cast<const typename Simd<T>::Memory*>(at);
}

template <class T>
inline void store(T* at, Vec<T> v) {
  *reinterpret_cast<typename Simd<T>::Memory*>(at) = v;
}

template <class T>
inline Vec<T> splat(T value) {
  return value - Vec<T>{};  // x - 0 is x for every x, so this folds to a broadcast
}

template <class T>
inline typename Simd<T>::I bits(Vec<T> v) {
  return reinterpret_cast<typename Simd<T>::I>(v);
}

template <class T>
inline Vec<T> from_bits(typename Simd<T>::I v) {
  return reinterpret_cast<Vec<T>>(v);
}

template <class T>
inline Vec<T> magnitude(Vec<T> v) {
  return from_bits<T>(bits<T>(v) & ~Simd<T>::sign);
}

template <class T>
inline Vec<T> with_sign_of(Vec<T> size, Vec<T> sign) {
  return from_bits<T>(bits<T>(size) | (bits<T>(sign) & Simd<T>::sign));
}

template <class T>
inline T sum(Vec<T> v) {
  T total = 0;
  for (int i = 0; i < lanes_of<T>; i++) total += v[i];
  return total;
}

// exp(u) = scale + scale * rest, for u <= 0. NaN stays NaN: every comparison below lets it through.
template <class T>
struct Exponential {
  Vec<T> scale, rest;

  explicit Exponential(Vec<T> u) {
    using S = Simd<T>;
    u = u < S::exp_floor ? splat<T>(S::exp_floor) : u;
    Vec<T> shifted = u * S::log2e + S::round_magic;
    typename S::I n = bits<T>(shifted) - bits<T>(splat<T>(S::round_magic));
    Vec<T> whole = shifted - S::round_magic;
    Vec<T> r = u - whole * S::ln2_high - whole * S::ln2_low;
    Vec<T> p = splat<T>(S::polynomial[0]);
    for (int i = 1; i < S::terms; i++) p = p * r + S::polynomial[i];
    rest = p * (r * r) + r;
    scale = from_bits<T>((n + S::exponent_bias) << S::mantissa);
  }
};

// exp(u) for u <= 0, zero below the smallest normal number.
template <class T>
inline Vec<T> exp_negative(Vec<T> u) {
  Exponential<T> e(u);
  return u < Simd<T>::exp_floor ? Vec<T>{} : e.scale * e.rest + e.scale;
}

// sigmoid(-|z|) with the sign of z. Keeps both sigmoid(z) and sigmoid(-z) to full relative accuracy in one
// number: a saturated gate has 1 - sigmoid(z) far below the spacing of floats near 1.
template <class T>
inline Vec<T> fold_sigmoid(Vec<T> z) {
  Vec<T> e = exp_negative<T>(from_bits<T>(bits<T>(z) | Simd<T>::sign));
  return with_sign_of<T>(e / (e + T(1)), z);
}

template <class T>
struct Gate {
  Vec<T> open, shut, slope;  // sigmoid(z), sigmoid(-z), their product

  explicit Gate(Vec<T> folded) {
    Vec<T> low = magnitude<T>(folded), high = T(1) - low;
    auto negative = bits<T>(folded) < 0;
    open = negative ? low : high;
    shut = negative ? high : low;
    slope = low * high;
  }
};

template <class T>
inline Vec<T> tanh(Vec<T> x) {
  Vec<T> u = from_bits<T>(bits<T>(x) | Simd<T>::sign);
  Exponential<T> e(u + u);
  Vec<T> expm1 = e.scale * e.rest + (e.scale - T(1));  // accurate near zero, where scale is 1
  return with_sign_of<T>(-expm1 / (expm1 + T(2)), x);
}

// After N. Juffa's erff: below one ulp on either branch.
inline Vec<float> erf(Vec<float> a) {
  Vec<float> t = magnitude<float>(a), s = a * a;
  Vec<float> far = t * -1.72853470e-5f + 3.83197126e-4f;
  far = far * s + (t * -3.88396438e-3f + 2.42546219e-2f);
  far = far * t - 1.06777877e-1f;
  far = far * t - 6.34846687e-1f;
  far = far * t - 1.28717512e-1f;
  far = far * t - t;
  far = with_sign_of<float>(1.f - exp_negative<float>(far < 0.f ? far : -t), a);
  Vec<float> near = s * -5.96761703e-4f + 4.99119423e-3f;
  near = near * s - 2.67681349e-2f;
  near = near * s + 1.12819925e-1f;
  near = near * s - 3.76125336e-1f;
  near = near * s + 1.28379166e-1f;
  near = near * a + a;
  return t > 0.927734375f ? far : near;
}

inline Vec<double> erf(Vec<double> a) {
  for (int i = 0; i < lanes_of<double>; i++) a[i] = ::erf(a[i]);
  return a;
}

}  // namespace DM_LEVEL
