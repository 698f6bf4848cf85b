// The engine with AVX2. Library headers come first: their functions are shared with other files and must run anywhere.
#include "headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define SB3_FP16_AVX2  // the target pragma defines no macros
#define SB3_FP16_F16C
#define SB3_FP16_ENGINE engine_avx2
#include "engine.inl"

#if defined(__clang__)
#pragma clang attribute pop
#endif
