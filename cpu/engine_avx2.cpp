// The engine on avx2. Library headers come first: their functions are shared with other files and must run anywhere.
#include "headers.h"

#pragma GCC target("avx2,fma,f16c")
#define SB3_FP16_AVX2  // the target pragma defines no macros
#define SB3_FP16_F16C
#define SB3_FP16_ENGINE engine_avx2
#include "engine.inl"
