// The exponential of sixteen lanes, and what is made of it. Relative errors are a few units of 2^-24; a result below
// 2^-126 is zero; a NaN stays one.
#pragma once
#include "vector.h"

constexpr double LOG2_E = 1.44269504088896341, LN_2 = 0.69314718055994531;
constexpr float LN_2_HIGH = 0x1.62E4p-1f, LN_2_LOW = float(LN_2 - LN_2_HIGH);  // multiples of the first are exact
constexpr float ROUNDER = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, kept in the low bits

// 2^(f + raise) for f in [-1/2, 1/2]: relative error below 1.4 x 2^-24.
template <int raise>
inline Floats exp2_of_fraction(Floats f) {
    constexpr float UNIT = float(1ull << (raise / 2)) * float(1ull << (raise - raise / 2));
    Floats p = splat<Floats>(0.0001535336191707485f * UNIT);
    p = p * f + 0.0013398874414264593f * UNIT;
    p = p * f + 0.00961843735764703f * UNIT;
    p = p * f + 0.05550332471125498f * UNIT;
    p = p * f + 0.24022647913628975f * UNIT;
    p = p * f + 0.6931472028550666f * UNIT;
    return p * f + UNIT;
}

// 2^(x + raise) for x + raise <= 126.
template <int raise = 0>
inline Floats exp2_lanes(Floats x) {
    constexpr float LOWEST = -126 - raise;
    const Floats clamped = larger(splat<Floats>(LOWEST), x);
    const Floats shifted = clamped + ROUNDER;
    const Floats p = exp2_of_fraction<raise>(clamped - (shifted - ROUNDER));
    return bit_cast<Floats>(x < LOWEST ? Ints{} : bit_cast<Ints>(p) + (bit_cast<Ints>(shifted) << 23));
}

// e^x for x <= 0. The multiple of ln 2 is taken off x before anything is rounded.
inline Floats exp_of_negative(Floats x) {
    constexpr float LOWEST = -126 * LN_2;
    const Floats clamped = larger(splat<Floats>(LOWEST), x);
    const Floats shifted = clamped * float(LOG2_E) + ROUNDER, n = shifted - ROUNDER;
    const Floats rest = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    const Floats p = exp2_of_fraction<0>(rest * float(LOG2_E));
    return bit_cast<Floats>(x < LOWEST ? Ints{} : bit_cast<Ints>(p) + (bit_cast<Ints>(shifted) << 23));
}

inline Floats magnitude(Floats x) { return bit_cast<Floats>(bit_cast<Ints>(x) & 0x7FFFFFFF); }

struct Sigmoid {
    Floats value, complement;  // 1 / (1 + e^-x) and 1 less that, neither by subtraction
};

inline Sigmoid sigmoid(Floats x) {
    const Floats e = exp_of_negative(-magnitude(x)), large = 1.0f / (1.0f + e), small = e * large;
    return {x < 0.0f ? small : large, x < 0.0f ? large : small};
}

struct Tanh {
    Floats value, slope;  // tanh x and 1 - tanh^2 x
};

inline Tanh hyperbolic_tangent(Floats x) {
    const Floats square = x * x, away = magnitude(x);
    Floats p = splat<Floats>(-0.00575479120016098f);  // least maximum of the relative error on |x| < 0.62
    p = p * square + 0.02068254165351391f;
    p = p * square - 0.05375269800424576f;
    p = p * square + 0.13331593573093414f;
    p = p * square - 0.3333328664302826f;
    const Floats near = x + x * square * p;
    const Floats t = exp_of_negative(-2.0f * away), inverse = 1.0f / (1.0f + t), far = (1.0f - t) * inverse;
    const Floats signed_far = bit_cast<Floats>(bit_cast<Ints>(far) | (bit_cast<Ints>(x) & INT32_MIN));
    return {away < 0.62f ? near : signed_far, away < 0.62f ? 1.0f - near * near : 4.0f * t * inverse * inverse};
}
