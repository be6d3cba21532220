// Runs the CUDA source of deepmemory/ops/nvrtc on the CPU, so that its arithmetic and its barriers can be tested without a
// GPU. This file is compiled for every set of constants; what runs the threads (emulated_gpu.cpp), once.
#include "emulated_gpu.h"

#define EMULATED
#define DEVICE inline
typedef long long int64;
// What <cmath> has too, which takes a fifth of the time to compile.
extern "C" float fabsf(float), copysignf(float, float), fmaf(float, float, float);
extern "C" float exp2f(float), expf(float), erff(float), tanhf(float);

#define shared_memory (self->shared)
inline int thread_index() { return self->index; }
inline int block_x() { return self->x; }
inline int block_y() { return self->y; }
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline float coarse_tanh(float x) { return tanhf(x); }
template <class To, class From> To same_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned bits_of(float x) { return same_bits<unsigned>(x); }
inline float float_of(unsigned bits) { return same_bits<float>(bits); }
inline int kept(int x) { return x; }
inline void open_exchange() {}
inline void receive(int, int) { cluster_barrier(); }
inline float from_lane_across(float x, int apart) {
    const int lane = self->index % 32;
    self->a[lane][0] = bits_of(x);
    warp_barrier();
    const float other = float_of(self->a[lane ^ apart][0]);
    warp_barrier();
    return other;
}
inline float round_to_tf32(float x) { return x != x ? x : float_of((bits_of(x) + 0x1000) & ~0x1fffu); }

struct Half;
struct Quad;
struct Words;
struct BFloat16;
inline float only_if(bool flag, float x) { return flag ? x : 0.f; }
inline float to_float(Half);
inline float to_float(BFloat16);
inline void round_to(Half&, float);
inline void round_to(BFloat16&, float);
inline Quad from_ring(const Quad* at);
inline Quad from_l2(const Quad* at);
inline void open_arrival(Arrival* arrival) { *arrival = 0; }
inline void written_for_fetching() {}
template <int QUADS> void fetch_to_shared(Quad* to, const Quad* from, Arrival* arrival);
template <int, class Input> void send_to_all(Input* target, Input value, bool there, int) {
    if (there) store_in_all_blocks(target, &value, sizeof value);
}
template <class Input> void send_to_team(Input* target, Input value, bool there);
void store_for_team(Words* to, const Words& w);
void load_if(bool wanted, Words& w, const Words* from);
template <class T> void load_or_zero(bool there, T& to, const void* from) {
    std::memset(&to, 0, sizeof to);
    if (!there) return;
    must_begin_at_a_multiple(from, sizeof to);
    std::memcpy(&to, from, sizeof to);
}
template <class Input> void multiply_tile(float* sum, const Words& a, unsigned b0, unsigned b1, Input);

#include "numbers.cuh"

inline float to_float(Half x) { return float(same_bits<_Float16>(x.bits)); }
inline float to_float(BFloat16 x) { return float_of(unsigned(x.bits) << 16); }
inline void round_to(Half& to, float x) { to.bits = same_bits<unsigned short>(_Float16(x)); }
inline void round_to(BFloat16& to, float x) {  // to the nearest, ties to even
    const unsigned bits = bits_of(x);
    to.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <int QUADS> void fetch_to_shared(Quad* to, const Quad* from, Arrival* arrival) {
    if (self->index % 32 == 0) start_copy(to, from, QUADS * sizeof *to, arrival);
}
inline Quad from_ring(const Quad* at) { return *at; }
inline Quad from_l2(const Quad* at) { return *at; }
template <class Input> void send_to_team(Input* target, Input value, bool there) {
    constexpr int together = 16 / sizeof(Input);
    const int lane = self->index % 32, place = lane % together;
    std::memcpy(reinterpret_cast<char*>(self->a[lane - place]) + place * sizeof value, &value, sizeof value);
    warp_barrier();
    unsigned words[4];
    std::memcpy(words, self->a[lane], sizeof words);
    warp_barrier();
    for (unsigned& word : words) word = word == POISON ? POISON - 1 : word;
    if (there && place == 0) store_for_team(reinterpret_cast<Words*>(target), {words[0], words[1], words[2], words[3]});
}
inline void store_for_team(Words* to, const Words& w) {
    store_in_global(&to->x, w.x), store_in_global(&to->y, w.y), store_in_global(&to->z, w.z), store_in_global(&to->w, w.w);
}
inline void load_if(bool wanted, Words& w, const Words* from) {
    if (!wanted) return;
    pause_at_times();
    w = *from;
    if (largest(w) == POISON) let_others_run();
}
// As PTX's manual places the elements of m16n8k16 (two bytes) and m16n8k8 (four) in the lanes' registers.
template <class Input> void multiply_tile(float* sum, const Words& a, unsigned b0, unsigned b1, Input) {
    constexpr int in_word = 4 / sizeof(Input), inputs = 8 * in_word;
    const int lane = self->index % 32;
    const unsigned of_a[] = {a.x, a.y, a.z, a.w}, of_b[] = {b0, b1};
    std::memcpy(self->a[lane], of_a, sizeof of_a), std::memcpy(self->b[lane], of_b, sizeof of_b);
    warp_barrier();
    const auto element = [](unsigned word, int place) {
        Input input;
        std::memcpy(&input, reinterpret_cast<char*>(&word) + place * sizeof input, sizeof input);
        return to_float(input);
    };
    for (int k = 0; k < 4; ++k) {
        const int output = lane / 4 + k / 2 * 8, row = lane % 4 * 2 + k % 2;
        for (int i = 0; i < inputs; ++i) {
            const int later = i / (inputs / 2), lane_of = i % (inputs / 2) / in_word;
            sum[k] += element(self->a[output % 8 * 4 + lane_of][output / 8 + 2 * later], i % in_word) *
                      element(self->b[row * 4 + lane_of][later], i % in_word);
        }
    }
    warp_barrier();
}

#include "layout.cuh"
#include "panels.cuh"
#include "elementwise.cuh"
#include "sweeps.cuh"
#include "products.cuh"

extern "C" void sweep_forward(const Arguments* a, int blocks, int runs) {
    const auto kernel = [](const void* a) { Forward(*static_cast<const Arguments*>(a)).run_all(); };
    emulate(CLUSTER, THREADS, blocks, runs, shared_size<false>(), kernel, a);
}
extern "C" void sweep_backward(const Arguments* a, int blocks, int runs) {
    const auto kernel = [](const void* a) { Backward(*static_cast<const Arguments*>(a)).run_all(); };
    emulate(CLUSTER, THREADS, blocks, runs, shared_size<true>(), kernel, a);
}
extern "C" void sum_products(const Products* p, int blocks, int runs) {
    const auto kernel = [](const void* p) { multiply_tiles(*static_cast<const Products*>(p)); };
    emulate(1, PRODUCT_THREADS, blocks, runs, products_shared(int(p->tile)), kernel, p);
}
extern "C" int shared_bytes(int back) { return 4 * (back ? shared_size<true>() : shared_size<false>()); }
extern "C" int quads_in_global(int back) { return back ? streamed_quads<true>() : streamed_quads<false>(); }
extern "C" int holds(int back) { return back ? Stream<true>::HOLDS : Stream<false>::HOLDS; }
extern "C" int quads_exchanged(int back) {
    return TEAM_BUFFERS * (back ? team_buffer_words<true>() : team_buffer_words<false>());
}
extern "C" int arguments_bytes() { return sizeof(Arguments); }
extern "C" int products_bytes() { return sizeof(Products); }
extern "C" int products_shared_bytes(const Products* p) { return 4 * products_shared(int(p->tile)); }
