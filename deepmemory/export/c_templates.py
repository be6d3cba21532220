"""The C code that all exported models share. ``@`` stands for the model's prefix, ``@@`` for it in capitals."""

FILE = """\
/*
 * Written by deepmemory $version. C99 that needs only the C library: cc -O3 -c $file, and link with -lm.
 *
$parts
 *
 * One step of one sequence: $inputs in, $output_size floats out.
 * $state_bytes bytes of state, $weight_bytes bytes of weights ($kind), $stack_bytes bytes of buffers on the stack.
 *
 *     @_state state;
 *     $input_example
 *     float y[@@_OUTPUTS];
 *
 *     @_reset(&state);
 *     while (...) {
 *         ... put the next input into x ...
 *         @_step(&state, x, y);
 *     }
 *
 * Reset before every new sequence. After each step y is the output of that step.
 * Nothing is allocated and nothing global changes: any number of states can be used side by side, in any thread.
 * $input_rule
 *
 * The file is its own header. To use it from another file, write
 *
 *     #define @@_HEADER
 *     #include "$file"
 */

#ifndef @@_DECLARED
#define @@_DECLARED
#define @@_INPUTS $input_size
#define @@_OUTPUTS $output_size

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
$fields
} @_state;

void @_reset(@_state *state);
void @_step(@_state *state, $input_parameter, float y[@@_OUTPUTS]);
$words
#ifdef __cplusplus
}
#endif
#endif

#ifndef @@_HEADER
#include <math.h>
$integers#include <string.h>

$arrays

$functions

void @_reset(@_state *state)
{
    memset(state, 0, sizeof *state);
}

void @_step(@_state *state, $input_parameter, float y[@@_OUTPUTS])
{
$body
}
#endif
"""

LAYER = """\
/* $title */
static void @_$name($parameters)
{
$body
}"""

# Functions that are written where something calls them, in this order.
FUNCTIONS = {
    "sigmoid": """\
static float @_sigmoid(float v)
{
    return 1.0f / (1.0f + expf(-v));
}""",
    "linear": """\
/* y = start + W x; start is a bias, y itself, or NULL for zeros. Four sums at a time, which compilers vectorise. */
static void @_linear(float *y, const float *start, const float *weight, const float *x, int rows, int columns)
{
    for (int i = 0; i < rows; i++, weight += columns) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        int j = 0;
        for (; j + 4 <= columns; j += 4)
            for (int k = 0; k < 4; k++)
                sum[k] += weight[j + k] * x[j + k];
        for (; j < columns; j++)
            sum[0] += weight[j] * x[j];
        y[i] = (start ? start[i] : 0.0f) + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}""",
    "linear_int8": """\
/* y = start + scale * (W x), a scale for each row; start is a bias, y itself, or NULL for zeros.
 * Four sums at a time, which compilers vectorise. */
static void @_linear(float *y, const float *start, const int8_t *weight, const float *scale, const float *x,
    int rows, int columns)
{
    for (int i = 0; i < rows; i++, weight += columns) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        int j = 0;
        for (; j + 4 <= columns; j += 4)
            for (int k = 0; k < 4; k++)
                sum[k] += (float)weight[j + k] * x[j + k];
        for (; j < columns; j++)
            sum[0] += (float)weight[j] * x[j];
        y[i] = (start ? start[i] : 0.0f) + scale[i] * ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}""",
    "row_int8": """\
/* One row of an embedding. */
static void @_row(float *y, const int8_t *weight, const float *scale, int row, int columns)
{
    for (int j = 0; j < columns; j++)
        y[j] = scale[row] * (float)weight[(size_t)row * (size_t)columns + (size_t)j];
}""",
    "leaky_relu": """\
static void @_leaky_relu(float *v, int n, float slope)
{
    for (int i = 0; i < n; i++)
        v[i] = v[i] < 0.0f ? slope * v[i] : v[i];
}""",
    "relu": """\
static void @_relu(float *v, int n)
{
    for (int i = 0; i < n; i++)
        v[i] = v[i] < 0.0f ? 0.0f : v[i];
}""",
    "tanh": """\
static void @_tanh(float *v, int n)
{
    for (int i = 0; i < n; i++)
        v[i] = tanhf(v[i]);
}""",
    "silu": """\
static void @_silu(float *v, int n)
{
    for (int i = 0; i < n; i++)
        v[i] *= @_sigmoid(v[i]);
}""",
    "gelu": """\
static void @_gelu(float *v, int n)
{
    for (int i = 0; i < n; i++)
        v[i] *= 0.5f * (1.0f + erff(v[i] * 0.707106781f));
}""",
    "sigmoids": """\
static void @_sigmoids(float *v, int n)
{
    for (int i = 0; i < n; i++)
        v[i] = @_sigmoid(v[i]);
}""",
    "add": """\
static void @_add(float *v, const float *other, int n)
{
    for (int i = 0; i < n; i++)
        v[i] += other[i];
}""",
    "memory_update": """\
/* h = h * sigmoid(z) + tanh(candidate) * (1 - sigmoid(z)), with v = [z, candidate] */
static void @_memory_update(float *h, const float *v, int n)
{
    for (int i = 0; i < n; i++) {
        const float keep = @_sigmoid(v[i]);
        h[i] = h[i] * keep + tanhf(v[n + i]) * (1.0f - keep);
    }
}""",
    "highway": """\
/* s = tanh(candidate) * sigmoid(transform) + s * (1 - sigmoid(transform)), with v = [candidate, transform] */
static void @_highway(float *s, const float *v, int n)
{
    for (int i = 0; i < n; i++) {
        const float open = @_sigmoid(v[n + i]);
        s[i] = tanhf(v[i]) * open + s[i] * (1.0f - open);
    }
}""",
    "gru_update": """\
/* a = W_ih x + b_ih and b = W_hh h + b_hh, both [reset, update, new] */
static void @_gru_update(float *h, const float *a, const float *b, int n)
{
    for (int i = 0; i < n; i++) {
        const float reset = @_sigmoid(a[i] + b[i]);
        const float keep = @_sigmoid(a[n + i] + b[n + i]);
        h[i] = h[i] * keep + tanhf(a[2 * n + i] + reset * b[2 * n + i]) * (1.0f - keep);
    }
}""",
    "lstm_update": """\
/* v = [input, forget, cell, output] */
static void @_lstm_update(float *h, float *c, const float *v, int n)
{
    for (int i = 0; i < n; i++) {
        c[i] = @_sigmoid(v[n + i]) * c[i] + @_sigmoid(v[i]) * tanhf(v[2 * n + i]);
        h[i] = @_sigmoid(v[3 * n + i]) * tanhf(c[i]);
    }
}""",
}
