// SiTU-GLU and its gradient (report eq. 12; spec.md section 4; the formulas are in fast/pointwise.py), element by element.
#include "exponential.h"
#include "rows.h"

namespace {

struct Factors {
    Tanh a, c;  // of gate / beta and up / linear_beta
    Sigmoid s;  // of gate
};

inline Factors factors(Floats gate, Floats up, float beta, float linear_beta) {
    return {hyperbolic_tangent(gate / beta), hyperbolic_tangent(up / linear_beta), sigmoid(gate)};
}

// Calls body(columns, offset) for each vector of a row; the last one has fewer columns.
template <class Body>
inline void each_vector(int64_t size, Body body) {
    for (int64_t i = 0; i < size; i += LANES) body(std::min<int64_t>(LANES, size - i), i);
}

template <class T>
inline Floats load_some(const T* x, int64_t count) {
    if (count == LANES) return load(x);
    T padded[LANES] = {};
    std::memcpy(padded, x, count * sizeof(T));
    return load(padded);
}

template <class T>
inline void store_some(T* to, Floats x, int64_t count) {
    if (count == LANES) return store(to, x);
    T padded[LANES];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

}  // namespace

extern "C" {

// out = beta a s linear_beta c. gate, up and out [count, size], of one element type.
void situ(const Rows* gate, const Rows* up, int64_t count, int64_t size, float* betas, const Rows* out, int64_t threads) {
    const float beta = betas[0], linear_beta = betas[1];
    with_type(out->is_bfloat16, out->data, [&](auto* to) {
        auto *g = static_cast<decltype(to)>(gate->data), *u = static_cast<decltype(to)>(up->data);
        parallel_for(count, threads, [&](int64_t r) {
            each_vector(size, [&](int64_t columns, int64_t i) {
                const Floats gs = load_some(g + r * gate->stride + i, columns);
                const Floats us = load_some(u + r * up->stride + i, columns);
                const Factors f = factors(gs, us, beta, linear_beta);
                store_some(to + r * out->stride + i, f.a.value * f.s.value * beta * (f.c.value * linear_beta), columns);
            });
        });
    });
}

// d_gate and d_up of d_y, whose element type may be another. All [count, size].
void situ_gradient(const Rows* gate, const Rows* up, const Rows* d_y, int64_t count, int64_t size, float* betas,
                   const Rows* d_gate, const Rows* d_up, int64_t threads) {
    const float beta = betas[0], linear_beta = betas[1];
    with_type(gate->is_bfloat16, gate->data, [&](auto* g) {
        with_type(d_y->is_bfloat16, d_y->data, [&](auto* d) {
            auto *u = static_cast<decltype(g)>(up->data), *to_g = static_cast<decltype(g)>(d_gate->data);
            auto* to_u = static_cast<decltype(g)>(d_up->data);
            parallel_for(count, threads, [&](int64_t r) {
                each_vector(size, [&](int64_t columns, int64_t i) {
                    const Floats gs = load_some(g + r * gate->stride + i, columns);
                    const Floats us = load_some(u + r * up->stride + i, columns);
                    const Floats ds = load_some(d + r * d_y->stride + i, columns);
                    const Factors f = factors(gs, us, beta, linear_beta);
                    const Floats slope = (f.a.slope + f.a.value * f.s.complement * beta) * f.s.value;
                    store_some(to_g + r * d_gate->stride + i, slope * f.c.value * linear_beta * ds, columns);
                    store_some(to_u + r * d_up->stride + i, f.a.value * f.s.value * beta * f.c.slope * ds, columns);
                });
            });
        });
    });
}
}
