// What bindings.cpp may ask of the device. Nothing here knows of Python or torch.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"
#include "rollout.h"

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

// The launches of an update around its networks; numbers of a rollout are in format `storage`.
void gather(const Where& where, int word_bytes, const void* in, const int64_t* indices, void* out, int64_t count, int64_t size);
void statistics(const Where& where, Storage storage, const StatisticsSettings& settings);
void gae(const Where& where, Storage storage, const GaeSettings& settings);
int64_t loss_workspace(int64_t count, int64_t size);  // bytes
void losses(const Where& where, Head head, Storage storage, Storage compute, const LossSettings& settings);

int device_count();

}  // namespace sb3_fp16
