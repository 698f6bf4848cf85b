// A library for test_losses.py: runs the kernels of gather.cuh, advantages.cuh and losses.cuh in the simulator.
#include "simulated.h"

#include "../../cuda/advantages.cuh"
#include "../../cuda/gather.cuh"
#include "../../cuda/losses.cuh"

namespace sb3_fp16 {
namespace {

std::string error;

// Null, or why the launch has ended.
template <class Kernel>
const char* run(int64_t blocks, int threads, uint64_t seed, const Kernel& kernel) {
    error.clear();
    try {
        simt::launch(dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), 0, kernel, seed);
    } catch (const std::exception& exception) {
        error = exception.what();
    }
    return error.empty() ? nullptr : error.c_str();
}

template <class Use>
const char* with_format(Storage storage, const Use& use) {
    return storage == Storage::fp32 ? use(Single{}) : storage == Storage::bf16 ? use(Brain{}) : use(Half{});
}

template <class F, class C>
const char* losses(Head head, const LossSettings& settings, int threads, uint64_t seed) {
    return run(1, threads, seed, [&] {
        if (head == Head::gaussian)
            gaussian_losses<F, C>(settings);
        else
            categorical_losses<F, C>(settings);
    });
}

}  // namespace
}  // namespace sb3_fp16

using namespace sb3_fp16;

extern "C" {

int64_t bytes_of_settings(int which) {
    return static_cast<int64_t>(which == 0 ? sizeof(StatisticsSettings) : which == 1 ? sizeof(GaeSettings) : sizeof(LossSettings));
}

int64_t workspace_bytes(int64_t count, int64_t size) { return gaussian_workspace(count, size); }

int threads_for(int64_t count) { return loss_threads(count); }

const char* run_gather(int bytes, const void* in, const int64_t* indices, void* out, int64_t count, int64_t size, uint64_t seed) {
    return run(gather_blocks(count, size), THREADS, seed, [=] {
        if (bytes == 2)
            gather_rows(static_cast<const uint16_t*>(in), indices, static_cast<uint16_t*>(out), count, size);
        else
            gather_rows(static_cast<const uint32_t*>(in), indices, static_cast<uint32_t*>(out), count, size);
    });
}

const char* run_statistics(Storage storage, const StatisticsSettings* settings, int threads, uint64_t seed) {
    return with_format(storage, [&](auto format) {
        return run(minibatches(settings->samples, settings->batch_size, settings->epochs), threads, seed,
                   [&] { advantage_statistics<decltype(format)>(*settings); });
    });
}

const char* run_gae(Storage storage, const GaeSettings* settings, uint64_t seed) {
    return with_format(storage, [&](auto format) {
        return run((settings->envs + THREADS - 1) / THREADS, THREADS, seed, [&] { gae<decltype(format)>(*settings); });
    });
}

const char* run_losses(Head head, Storage storage, Storage compute, const LossSettings* settings, int threads, uint64_t seed) {
    if (storage == Storage::bf16) return losses<Brain, Brain>(head, *settings, threads, seed);
    if (storage != Storage::fp32) return losses<Half, Half>(head, *settings, threads, seed);
    if (compute == Storage::fp16) return losses<Single, Half>(head, *settings, threads, seed);
    if (compute == Storage::bf16) return losses<Single, Brain>(head, *settings, threads, seed);
    return losses<Single, Single>(head, *settings, threads, seed);
}

}  // extern "C"
