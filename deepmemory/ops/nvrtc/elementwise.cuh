// Activations, gates and their slopes.

// Short chains of instructions: a step waits for them. Each is good to a few units in the last place of float32; only
// where values are bfloat16 (8 bits) is tanh the hardware's (11 bits).
DEVICE float exp_of_negative(float x) {  // exp(-|x|)
    const float scale = -1.44269504f * fabsf(x);
    const float rest = fmaf(-1.44269504f, fabsf(x), -scale) - 1.92596303e-8f * fabsf(x);
    const float power = power_of_two(scale);
    return fmaf(power, 0.69314718f * rest, power);
}
struct Gate { float open, shut; };  // sigmoid(z) and 1 - sigmoid(z), each accurate where it is small
DEVICE Gate gate(float z) {
    const float e = exp_of_negative(z), big = reciprocal(1.f + e), small = e * big;
    return z >= 0.f ? Gate{big, small} : Gate{small, big};
}
DEVICE float tanh_of(float x) {
    if (VALUE == 1) return coarse_tanh(x);
    const float e = exp_of_negative(2.f * x), large = copysignf((1.f - e) * reciprocal(1.f + e), x);
    const float q = x * x;  // below 0.35 the series, where the other way would lose digits
    float tail = -0.0088632355f;
    tail = fmaf(tail, q, 0.021869488f);
    tail = fmaf(tail, q, -0.053968254f);
    tail = fmaf(tail, q, 0.13333334f);
    tail = fmaf(tail, q, -0.33333334f);
    return fabsf(x) < 0.35f ? fmaf(x * q, tail, x) : x != x ? x : large;
}
DEVICE float sigmoid(float z) { return gate(z).open; }

DEVICE float activate(float a) {
    if (ACTIVATION == LEAKY_RELU) return a > 0.f ? a : 0.01f * a;
    if (ACTIVATION == RELU) return a > 0.f ? a : (a != a ? a : 0.f);
    if (ACTIVATION == TANH) return tanh_of(a);
    if (ACTIVATION == SILU) return a * sigmoid(a);
    return 0.5f * a * (1.f + erff(a * 0.70710678f));
}
DEVICE float slope_from(float activated) {  // where what came out tells the slope
    if (ACTIVATION == LEAKY_RELU) return activated > 0.f ? 1.f : 0.01f;
    if (ACTIVATION == RELU) return activated <= 0.f ? 0.f : 1.f;  // 1 for NaN, as torch's
    return 1.f - activated * activated;
}
DEVICE float slope_at(float a, float activated) {
    if (ACTIVATION == SILU) {
        const Gate g = gate(a);
        return g.open * (1.f + a * g.shut);
    }
    if (ACTIVATION == GELU) return 0.5f * (1.f + erff(a * 0.70710678f)) + a * 0.39894228f * expf(-0.5f * a * a);
    return slope_from(activated);
}
