// A matrix as Python hands it over: rows that are contiguous each, of float or bfloat16.
#pragma once
#include "vector.h"

extern "C" struct Rows {
    void* data;
    int64_t stride;  // between rows, in elements
    int32_t is_bfloat16;
};

// Calls body with the data under its element type, told apart at run time.
template <class Body>
inline void with_type(int is_bfloat16, void* x, Body body) {
    if (is_bfloat16) {
        body(static_cast<bfloat16*>(x));
    } else {
        body(static_cast<float*>(x));
    }
}
