// The engine on avx512. Library headers come first: their functions are shared with other files and must run anywhere.
#include "headers.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define SB3_FP16_AVX512  // the target pragma defines no macros
#define SB3_FP16_F16C
#define SB3_FP16_ENGINE engine_avx512
#include "engine.inl"
