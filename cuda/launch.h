// What bindings.cpp may ask of the device. Nothing here knows of Python or torch.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"

namespace sb3_fp16 {

// The caller's device and stream.
struct Where {
    int device;
    void* stream;
};

// An optimizer step over any number of parameters: their slices in tables, and the workspace's layout.
struct StepPlan {
    Storage parameters, state;  // formats; of moments in FP32 the optimizer is Adam
    std::vector<Slice> slices;  // those of one network after another

    // Bytes of workspace that the slices need; with a base address they are told where theirs is.
    int64_t lay_out(char* workspace);
    std::vector<Table> tables() const;
    // Where each network's sums of squares lie: `coefficient` of a slice is the number of its network.
    void find_partials(NormSettings& norm) const;
};

// One step of SHARP, or of Adam where that is what the plan is for; `norm` is null where κ is given.
void optimizer_step(const Where& where, const StepPlan& plan, const SharpSettings& settings, const NormSettings* norm);

int device_count();

}  // namespace sb3_fp16
