// The engine with AVX-512. Library headers come first: their functions are shared with other files and must run anywhere.
#include "headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define SB3_FP16_AVX512  // the target pragma defines no macros
#define SB3_FP16_F16C
#define SB3_FP16_ENGINE engine_avx512
#include "engine.inl"

#if defined(__clang__)
#pragma clang attribute pop
#endif
