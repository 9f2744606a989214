// MX quantisation on the bits (spec.md section 6): blocks of 32 values under one power-of-two scale.
//
// All arithmetic is exact but for the one rounding to the grid, which is an addition and a subtraction of 1.5 x 2^k.
// Scale codes are E8M0: 2^(code - 127), 255 for NaN.
#include "rows.h"

namespace {

constexpr int64_t BLOCK = 32, BLOCKS_AT_ONCE = 1024;
constexpr int32_t INFINITE = 0x7F800000, MAGNITUDE = 0x7FFFFFFF, NAN_SCALE = 255;

template <int mantissa_bits_, int min_exponent_, int max_exponent_, int largest_index_, int bits_>
struct Element {
    static constexpr int mantissa_bits = mantissa_bits_, min_exponent = min_exponent_, max_exponent = max_exponent_;
    static constexpr int largest_index = largest_index_, bits = bits_;
    static constexpr int32_t smallest_field = (min_exponent + 127) << 23;
    static constexpr float largest =
        float((1 << mantissa_bits) + (largest_index & ((1 << mantissa_bits) - 1))) * (1 << (max_exponent - mantissa_bits));
};
using MXFP4 = Element<1, 0, 2, 0x7, 4>;
using E4M3 = Element<3, -6, 8, 0x7E, 8>;
using E5M2 = Element<2, -14, 15, 0x7B, 8>;

inline float power_of_two(int code) { return bit_cast<float>(code ? code << 23 : 1 << 22); }  // 2^(code - 127)

inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }

inline int32_t largest(Ints v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32(bit_cast<__m512i>(v));
#else
    int32_t m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

inline Bytes bytes(Ints v) {
#ifdef __AVX512F__
    return bit_cast<Bytes>(_mm512_cvtepi32_epi8(bit_cast<__m512i>(v)));
#else
    return __builtin_convertvector(v, Bytes);
#endif
}

// Pairs of codes in one byte each, the even one low.
inline uint64_t paired(Bytes codes) {
    typedef uint16_t Pairs __attribute__((vector_size(LANES)));
    typedef uint8_t Packed __attribute__((vector_size(LANES / 2)));
    Pairs pairs = bit_cast<Pairs>(codes);
    return bit_cast<uint64_t>(__builtin_convertvector(pairs | pairs >> 4, Packed));
}

inline Ints ints(Bytes v) {
#ifdef __AVX512F__
    return bit_cast<Ints>(_mm512_cvtepu8_epi32(bit_cast<__m128i>(v)));
#else
    return __builtin_convertvector(v, Ints);
#endif
}

template <bool round_to_bfloat16, class T>
inline Ints load_bits(const T* x) {
    Floats values = load(x);
    if constexpr (round_to_bfloat16) {
        bfloat16 rounded[LANES];
        store(rounded, values);
        values = load(rounded);
    }
    return bit_cast<Ints>(values);
}

// The scale code of a block whose largest magnitude has these bits. ``carry`` takes a significand past the rule's
// threshold into the next exponent. A subnormal or zero largest gives code 0.
template <class E>
inline int scale_code(int32_t amax, int32_t carry) {
    return amax >= INFINITE ? NAN_SCALE : std::max(((amax + carry) >> 23) - E::max_exponent, 0);
}

// Magnitudes times the inverse scale, rounded to the grid: the sum with ``magic``, whose low bits count grid steps.
template <class E>
struct Rounded {
    Ints field, magic;
    Floats sum;

    Rounded(Ints magnitude, float inverse) {
        Floats y = bit_cast<Floats>(magnitude) * inverse;
        y = y < E::largest ? y : splat<Floats>(E::largest);
        field = larger(bit_cast<Ints>(y) & INFINITE, splat<Ints>(E::smallest_field));
        magic = field + ((23 - E::mantissa_bits) << 23 | 1 << 22);
        sum = y + bit_cast<Floats>(magic);
    }
    Floats value() const { return sum - bit_cast<Floats>(magic); }
    Ints index() const {
        return ((field - E::smallest_field) >> (23 - E::mantissa_bits)) + (bit_cast<Ints>(sum) - magic);
    }
};

template <class E, bool round_to_bfloat16, class T>
inline void fake_quantize_block(const T* x, int32_t carry, T* out, uint8_t* inside) {
    Ints v[2] = {load_bits<round_to_bfloat16>(x), load_bits<round_to_bfloat16>(x + LANES)};
    const int code = scale_code<E>(largest(larger(v[0] & MAGNITUDE, v[1] & MAGNITUDE)), carry);
    const float scale = code == NAN_SCALE ? __builtin_nanf("") : power_of_two(code);
    const float inverse = power_of_two(code == NAN_SCALE ? 0 : 254 - code);
    for (int half = 0; half < 2; half++) {
        Ints magnitude = v[half] & MAGNITUDE;
        Floats value = Rounded<E>(magnitude, inverse).value() * scale;
        store(out + half * LANES, bit_cast<Floats>(bit_cast<Ints>(value) | (v[half] & ~MAGNITUDE)));
        if (inside) {
            Ints kept = code == NAN_SCALE ? magnitude < INFINITE
                                          : bit_cast<Floats>(magnitude) * inverse <= E::largest;
            Bytes flags = bytes(kept & 1);
            std::memcpy(inside + half * LANES, &flags, sizeof(flags));
        }
    }
}

// Codes of a block, one a byte or two; returns the scale code.
template <class E, class T>
inline uint8_t quantize_block(const T* x, int32_t carry, uint8_t* codes, bool packed) {
    Ints v[2] = {load_bits<false>(x), load_bits<false>(x + LANES)};
    const int code = scale_code<E>(largest(larger(v[0] & MAGNITUDE, v[1] & MAGNITUDE)), carry);
    if (code == NAN_SCALE) {
        std::memset(codes, 0, packed ? BLOCK / 2 : BLOCK);
        return NAN_SCALE;
    }
    for (int half = 0; half < 2; half++) {
        Ints index = Rounded<E>(v[half] & MAGNITUDE, power_of_two(254 - code)).index();
        index |= (v[half] >> (32 - E::bits)) & (1 << (E::bits - 1));
        Bytes one_each = bytes(index);
        if (packed) {
            const uint64_t two_each = paired(one_each);
            std::memcpy(codes + half * LANES / 2, &two_each, sizeof(two_each));
        } else {
            std::memcpy(codes + half * LANES, &one_each, sizeof(one_each));
        }
    }
    return code;
}

// Values of 16 codes.
template <class E>
inline Floats decode(Ints code) {
    if constexpr (E::bits == 4) {
        const Floats table = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
        return __builtin_shuffle(table, code);
    } else {
        Ints index = code & 0x7F;
        Ints normal = (index << (23 - E::mantissa_bits)) + (E::smallest_field - (1 << 23));
        Floats subnormal = __builtin_convertvector(index, Floats) * power_of_two(127 + E::min_exponent - E::mantissa_bits);
        Ints value = index < (1 << E::mantissa_bits) ? bit_cast<Ints>(subnormal) : normal;
        value = index > E::largest_index ? splat<Ints>(0x7FC00000) : value;
        if (E::mantissa_bits == 2) value = index == E::largest_index + 1 ? splat<Ints>(INFINITE) : value;  // E5M2's infinity
        return bit_cast<Floats>(value | (code & 0x80) << 24);
    }
}

template <bool packed>
inline Ints load_codes(const uint8_t* codes) {
    if constexpr (packed) {
        uint8_t twice[LANES];
        for (int i = 0; i < LANES; i++) twice[i] = codes[i / 2];
        const Ints shift = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4};
        return (ints(load_as<Bytes>(twice)) >> shift) & 0xF;
    } else {
        return ints(load_as<Bytes>(codes));
    }
}

template <class E, bool packed, class T>
inline void dequantize_block(int scale_code, const uint8_t* codes, T* out) {
    const float scale = scale_code == NAN_SCALE ? __builtin_nanf("") : power_of_two(scale_code);
    for (int half = 0; half < 2; half++) {
        Ints code = load_codes<packed>(codes + half * LANES / (packed ? 2 : 1));
        store(out + half * LANES, decode<E>(code) * scale);
    }
}

template <class Body>
void each_block(int64_t blocks, int64_t threads, Body body) {
    parallel_for((blocks + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE, threads, [&](int64_t part) {
        const int64_t end = std::min(blocks, (part + 1) * BLOCKS_AT_ONCE);
        for (int64_t b = part * BLOCKS_AT_ONCE; b < end; b++) body(b);
    });
}

template <class Body>
void with_element(int format, Body body) {
    switch (format) {
        case 0: return body(MXFP4{});
        case 1: return body(E4M3{});
        default: return body(E5M2{});
    }
}

}  // namespace

extern "C" {

// ``round_first``: x is rounded to bfloat16 first. ``inside``: where given, 0 beyond the largest magnitude, else 1.
void mx_fake_quantize(void* x, int is_bfloat16, int64_t blocks, int64_t format, int64_t carry, int round_first, void* out,
                      uint8_t* inside, int64_t threads) {
    with_element(format, [&](auto element) {
        with_type(is_bfloat16, x, [&](auto* from) {
            auto* to = static_cast<decltype(from)>(out);
            auto run = [&](auto rounds) {
                each_block(blocks, threads, [&](int64_t b) {
                    const int64_t i = b * BLOCK;
                    fake_quantize_block<decltype(element), rounds>(from + i, carry, to + i, inside ? inside + i : nullptr);
                });
            };
            if (round_first) {
                run(std::true_type{});
            } else {
                run(std::false_type{});
            }
        });
    });
}

void mx_quantize(void* x, int is_bfloat16, int64_t blocks, int64_t format, int64_t carry, uint8_t* scales, uint8_t* codes,
                 int packed, int64_t threads) {
    with_element(format, [&](auto element) {
        with_type(is_bfloat16, x, [&](auto* from) {
            each_block(blocks, threads, [&](int64_t b) {
                uint8_t* to = codes + b * BLOCK / (packed ? 2 : 1);
                scales[b] = quantize_block<decltype(element)>(from + b * BLOCK, carry, to, packed);
            });
        });
    });
}

void mx_dequantize(const uint8_t* scales, const uint8_t* codes, int packed, int64_t blocks, int64_t format, void* out,
                   int is_bfloat16, int64_t threads) {
    with_element(format, [&](auto element) {
        with_type(is_bfloat16, out, [&](auto* to) {
            auto run = [&](auto in_pairs) {
                each_block(blocks, threads, [&](int64_t b) {
                    const uint8_t* from = codes + b * BLOCK / (in_pairs ? 2 : 1);
                    dequantize_block<decltype(element), in_pairs>(scales[b], from, to + b * BLOCK);
                });
            };
            if (packed) {
                run(std::true_type{});
            } else {
                run(std::false_type{});
            }
        });
    });
}
}
