// The LK loss of rows of logits, and its gradient (spec.md section 5; the derivation is in fast/loss.py).
//
// A row's normaliser is two numbers, its largest logit m and l = log sum exp(x - m), so that log p = x - m - l. Inside,
// logarithms are to base 2. Both sides of the loss take this one path: equal logits give equal bits.
#include <cmath>

#include "exponential.h"
#include "rows.h"

namespace {

constexpr float LOG2_E_HIGH = float(LOG2_E), LOG2_E_LOW = float(LOG2_E - LOG2_E_HIGH);  // one float errs one way by u / 4
constexpr int64_t BLOCK = 2048;  // values summed in float32 before the sum moves to double
constexpr int RAISE = 100;  // the acceptance is summed times 2^RAISE: at 2^-100 or more it loses no term above 2^-126 a
constexpr int UNROLL = 4;

// log2 of the probabilities of one row.
struct Log2Probs {
    float m, l;
    explicit Log2Probs(const float* normaliser) : m(normaliser[0]), l(float(normaliser[1] * LOG2_E)) {}
    Floats operator()(Floats x) const { return (x - m) * LOG2_E_HIGH + ((x - m) * LOG2_E_LOW - l); }
};

inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

inline float largest(Floats v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

inline double total(Floats v) {
    double s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

// The last, partial vector of a row, filled up with what changes no sum and no maximum.
template <class T>
inline Floats load_tail(const T* x, int64_t count) {
    T padded[LANES];
    for (int i = 0; i < LANES; i++) {
        if (i < count) {
            padded[i] = x[i];
        } else if constexpr (sizeof(T) == 4) {
            padded[i] = -INFINITY;
        } else {
            padded[i].bits = 0xFF80;  // -infinity
        }
    }
    return load(padded);
}

// Calls body(accumulator index, offset, lanes...) for the vectors of [from, to) of the given rows.
template <class Body, class... T>
inline void each_vector(int64_t from, int64_t to, Body body, const T*... x) {
    int64_t i = from;
    for (; i + UNROLL * LANES <= to; i += UNROLL * LANES) {
#pragma GCC unroll 4
        for (int u = 0; u < UNROLL; u++) body(u, i + u * LANES, load(x + i + u * LANES)...);
    }
    for (; i + LANES <= to; i += LANES) body(0, i, load(x + i)...);
    if (i < to) body(0, i, load_tail(x + i, to - i)...);
}

// Sums of N quantities over a row: float32 in lanes within a block, double across blocks.
template <int N, class Term, class... T>
inline void sum_row(int64_t size, double (&sums)[N], Term term, const T*... x) {
    for (int n = 0; n < N; n++) sums[n] = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        Floats lanes[N][UNROLL] = {};
        auto add = [&](int u, int64_t, auto... values) {
            Floats terms[N];
            term(terms, values...);
            for (int n = 0; n < N; n++) lanes[n][u] += terms[n];
        };
        each_vector(start, std::min(start + BLOCK, size), add, x...);
        for (int n = 0; n < N; n++) {
            sums[n] += total((lanes[n][0] + lanes[n][1]) + (lanes[n][2] + lanes[n][3]));
        }
    }
}

template <class Term, class... T>
inline float largest_in_row(int64_t size, Term term, const T*... x) {
    Floats lanes[UNROLL];
    for (int u = 0; u < UNROLL; u++) lanes[u] = splat<Floats>(-INFINITY);
    auto keep = [&](int u, int64_t, auto... values) {
        Floats v = term(values...);
        lanes[u] = larger(v, lanes[u]);
    };
    each_vector(0, size, keep, x...);
    for (int u = 1; u < UNROLL; u++) lanes[0] = larger(lanes[u], lanes[0]);
    return largest(lanes[0]);
}

// NaN if one of the row is, else the largest.
template <class T>
inline float largest_logit(const T* x, int64_t size) {
    Ints nan = {};
    float m = largest_in_row(size, [&](Floats v) { nan |= v != v; return v; }, x);
    for (int i = 0; i < LANES; i++) m = nan[i] ? NAN : m;
    return m;
}

template <class T>
inline void row_normaliser(const T* x, int64_t size, float* normaliser) {
    const float m = largest_logit(x, size);  // a NaN spreads from here to all of the row
    double sums[1];
    const float largest_alone[2] = {m, 0};
    const Log2Probs unnormalised(largest_alone);
    sum_row<1>(size, sums, [=](Floats* terms, Floats v) { terms[0] = exp2_lanes(unnormalised(v)); }, x);
    normaliser[0] = m;
    normaliser[1] = float(std::log(sums[0]));
}

// Statistics of a row: the draft's normaliser, the log of the acceptance a, and (sum of q where q < p) / a.
template <class Z, class Y>
inline void row_statistics(const Z* z, const Y* y, int64_t size, const float* target, float* statistics) {
    row_normaliser(z, size, statistics);
    const Log2Probs of_draft(statistics), of_target(target);
    auto sums_of = [&](double (&sums)[2], auto exponential) {
        auto term = [=](Floats* terms, Floats zv, Floats yv) {
            Floats log_q = of_draft(zv), log_p = of_target(yv);
            terms[0] = exponential(smaller(log_p, log_q));
            terms[1] = log_q < log_p ? terms[0] : splat<Floats>(0.0f);
        };
        sum_row<2>(size, sums, term, z, y);
    };
    double sums[2], log2_unit = -RAISE;
    sums_of(sums, [](Floats low) { return exp2_lanes<RAISE>(low); });
    if (sums[0] < 1) {  // rare: sum again, relative to the largest term
        auto low = [=](Floats zv, Floats yv) { return smaller(of_target(yv), of_draft(zv)); };
        const float top = largest_in_row(size, low, z, y);
        sums_of(sums, [top](Floats low) { return exp2_lanes(low - top); });
        log2_unit = top;
    }
    // A comparison with NaN chooses the other side; so what makes a row NaN is added where it cannot get lost.
    const float nan_or_0 = (statistics[0] - statistics[0]) + (target[0] - target[0]);
    statistics[2] = float(std::log(sums[0]) + log2_unit / LOG2_E) + nan_or_0;
    statistics[3] = float(sums[1] / sums[0]) + nan_or_0;
}

template <class Z, class Y, class G>
inline void row_gradient(const Z* z, const Y* y, int64_t size, const float* target, const float* statistics,
                         float weight, G* out) {
    if (weight == 0) {
        std::memset(out, 0, size * sizeof(G));
        return;
    }
    const Log2Probs of_draft(statistics), of_target(target);
    const float log_a = float(statistics[2] * LOG2_E), share = statistics[3];
    const float rest = float(double(share) * std::exp(double(statistics[2])) - 1);  // sum of q where q < p, less 1
    auto body = [=](int, int64_t i, Floats zv, Floats yv) {
        Floats log_q = of_draft(zv), log_p = of_target(yv);
        Floats g = exp2_lanes(log_q < log_p ? log_q - log_a : log_q);
        g *= log_q < log_p ? splat<Floats>(weight * rest) : splat<Floats>(weight * share);
        if (i + LANES <= size) {
            store(out + i, g);
        } else {
            G padded[LANES];
            store(padded, g);
            std::memcpy(out + i, padded, (size - i) * sizeof(G));
        }
    };
    each_vector(0, size, body, z, y);
}

}  // namespace

extern "C" {

void lk_normaliser(const Rows* x, int64_t count, int64_t size, float* normaliser, int64_t threads) {
    with_type(x->is_bfloat16, x->data, [&](auto* data) {
        parallel_for(count, threads, [&](int64_t r) { row_normaliser(data + r * x->stride, size, normaliser + 2 * r); });
    });
}

// Of each row of z: the statistics [count, 4] unless ``given`` says that they are there already, and with ``out`` the
// gradient. Row r of z goes with row ``rows[r]`` of y, or r where ``rows`` is null. ``out`` may be z.
void lk_rows(const Rows* z, const Rows* y, const int64_t* rows, const float* normaliser, int64_t count, int64_t size,
             float* statistics, int given, const float* weight, const Rows* out, int64_t threads) {
    with_type(z->is_bfloat16, z->data, [&](auto* draft) {
        with_type(y->is_bfloat16, y->data, [&](auto* target) {
            parallel_for(count, threads, [&](int64_t r) {
                const int64_t of_target = rows ? rows[r] : r;
                auto *draft_row = draft + r * z->stride;
                auto *target_row = target + of_target * y->stride;
                const float* target_normaliser = normaliser + 2 * of_target;
                float* of_row = statistics + 4 * r;
                if (!given) row_statistics(draft_row, target_row, size, target_normaliser, of_row);
                if (!out) return;
                with_type(out->is_bfloat16, out->data, [&](auto* d) {
                    row_gradient(draft_row, target_row, size, target_normaliser, of_row, weight[r], d + r * out->stride);
                });
            });
        });
    });
}
}
