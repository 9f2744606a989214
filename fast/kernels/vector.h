// Sixteen lanes in GCC's vector extension, which it lowers to whatever the machine has, and a parallel loop. Little-
// endian. Sums run in a fixed order of lanes within a row, so results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>  // for the three conversions that GCC 12 lowers badly; the results are the same
#endif

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct bfloat16 {
    uint16_t bits;
};

template <class V>
inline V splat(decltype(V{}[0] + 0) value) {
    return V{} + value;
}

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <class V>
inline V load_as(const void* source) {
    V v;
    std::memcpy(&v, source, sizeof(v));
    return v;
}

inline Floats load(const float* x) { return load_as<Floats>(x); }

inline Words widen(Halves x) {
#ifdef __AVX512F__
    return bit_cast<Words>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(x)));
#else
    return __builtin_convertvector(x, Words);
#endif
}

inline Halves narrow(Words x) {
#ifdef __AVX512F__
    return bit_cast<Halves>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(x)));
#else
    return __builtin_convertvector(x, Halves);
#endif
}

inline Floats larger(Floats a, Floats b) {  // b where one is NaN
#ifdef __AVX512F__
    return bit_cast<Floats>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#else
    return a > b ? a : b;
#endif
}

inline Floats load(const bfloat16* x) { return bit_cast<Floats>(widen(load_as<Halves>(x)) << 16); }

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

inline void store(bfloat16* to, Floats x) {  // to nearest, half to even; not for a NaN whose last bits are set
    Words bits = bit_cast<Words>(x);
    Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    Halves half = narrow(rounded);
    std::memcpy(to, &half, sizeof(half));
}

// Calls body(i) for each i in [0, count) with that many threads; the next index goes to whoever is free, so a thread that
// the system has put aside holds up one item only. With OpenMP the threads are PyTorch's own: after each of its loops they
// spin for a while, and others would have to share the processors with them.
template <class Body>
void parallel_for(int64_t count, int64_t threads, Body body) {
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) body(i);
#else
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < std::min(threads, count); t++) others.emplace_back(work);
    work();
    for (auto& other : others) other.join();
#endif
}
