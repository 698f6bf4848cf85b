// Lets cuda/launch.cu run its kernels in the simulator. SB3_FP16_SIMT_SEED in the environment: in which order threads go.
#pragma once

#include <cstdlib>

#include "simt.h"

#define __grid_constant__

namespace simt {
inline uint64_t seed() {
    const char* text = std::getenv("SB3_FP16_SIMT_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 0;
}
}  // namespace simt
