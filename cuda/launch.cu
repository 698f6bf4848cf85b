// Launches and error checks. Under a C++ compiler, after tests/cuda/simt.h, the same code runs the kernels on a CPU.
#include "launch.h"

#include <stdexcept>
#include <string>
#include <type_traits>

#include "adam.cuh"
#include "advantages.cuh"
#include "gather.cuh"
#include "losses.cuh"
#include "norm.cuh"
#include "sharp.cuh"

namespace sb3_fp16 {
namespace {

#ifdef __CUDACC__
void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

// The caller's device while it lives.
class Device {
public:
    explicit Device(int device) {
        check(cudaGetDevice(&before), "no device can be used");
        if (device != before) check(cudaSetDevice(device), "the device cannot be used");
    }
    ~Device() { cudaSetDevice(before); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

private:
    int before = 0;
};

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), int64_t blocks, int threads, const Where& where, const Arguments&... arguments) {
    if (blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, static_cast<cudaStream_t>(where.stream)>>>(arguments...);
    check(cudaGetLastError(), "a kernel was not launched");
}
#else
struct Device {
    explicit Device(int) {}
};

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), int64_t blocks, int threads, const Where&, const Arguments&... arguments) {
    if (blocks) simt::launch(dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), 0, [&] { kernel(arguments...); }, simt::seed());
}
#endif

template <class Use>
void with_format(Storage storage, Use use) {
    if (storage == Storage::fp32) return use(Single{});
    if (storage == Storage::bf16) return use(Brain{});
    use(Half{});
}

int64_t over(const Table& table, int64_t (*blocks)(const Slice&)) {
    int64_t sum = 0;
    for (int64_t i = 0; i < table.count; ++i) sum += blocks(table.slices[i]);
    return sum;
}

void adam_step(const Where& where, const std::vector<Table>& tables, const SharpSettings& settings, const NormSettings* norm) {
    if (norm) {
        for (const Table& table : tables) run(square_sums<Single>, over(table, square_blocks), THREADS, where, table, settings, false);
        run(gradient_norm, 1, THREADS, where, *norm);
    }
    for (const Table& table : tables) {
        run(begin_step, 1, 32, where, table, settings.skip);
        run(adam_elements, over(table, element_blocks), THREADS, where, table, settings);
    }
}

template <class P, class M>
void sharp_step(const Where& where, const std::vector<Table>& tables, const SharpSettings& settings, const NormSettings* norm) {
    for (const Table& table : tables) run(square_sums<P>, over(table, square_blocks), THREADS, where, table, settings, false);
    if (norm) run(gradient_norm, 1, THREADS, where, *norm);
    if (settings.weight_decay != 0.0f && !settings.decoupled_weight_decay)  // second moments are of g with its penalty
        for (const Table& table : tables) run(square_sums<P>, over(table, square_blocks), THREADS, where, table, settings, true);
    for (const Table& table : tables) {
        run(begin_step, 1, 32, where, table, settings.skip);
        run(square_roots<P, M>, table.count, THREADS, where, table, settings);
        run(sharp_elements<P, M>, over(table, element_blocks), THREADS, where, table, settings);
    }
}

}  // namespace

int64_t StepPlan::lay_out(char* workspace) {
    int64_t bytes = 0;
    const auto take = [&](auto*& pointer, int64_t count) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(workspace + bytes);
        bytes += count * static_cast<int64_t>(sizeof *pointer);
    };
    for (Slice& slice : slices) take(slice.partials, Rows(slice).count);  // together: the norm adds them all
    for (Slice& slice : slices) {
        if (slice.sharing == Sharing::elementwise) continue;
        take(slice.row_share, slice.rows);
        if (slice.sharing != Sharing::rank1) continue;
        take(slice.column_root, slice.columns);
        take(slice.column_partials, divided_up(slice.rows, ROWS_TOGETHER) * slice.columns);
    }
    return bytes;
}

void StepPlan::find_partials(NormSettings& norm) const {
    for (const Slice& slice : slices) {
        const int k = slice.coefficient;
        if (k < 0 || k >= norm.networks) throw std::invalid_argument("a parameter belongs to no network");
        if (norm.partial_counts[k] == 0) norm.partials[k] = slice.partials;
        norm.partial_counts[k] += Rows(slice).count;
    }
}

std::vector<Table> StepPlan::tables() const {
    std::vector<Table> result;
    for (size_t i = 0; i < slices.size(); ++i) {
        if (i % MOST_SLICES == 0) result.push_back({});
        Table& table = result.back();
        Slice slice = slices[i];
        if (table.count) {
            const Slice& last = table.slices[table.count - 1];
            slice.first_square_block = last.first_square_block + square_blocks(last);
            slice.first_element_block = last.first_element_block + element_blocks(last);
        }
        table.slices[table.count++] = slice;
    }
    return result;
}

void optimizer_step(const Where& where, const StepPlan& plan, const SharpSettings& settings, const NormSettings* norm) {
    const Device device(where.device);
    const std::vector<Table> tables = plan.tables();
    const auto step = [&](auto parameters, auto state) {
        sharp_step<decltype(parameters), decltype(state)>(where, tables, settings, norm);
    };
    const auto is = [&](Storage parameters, Storage state) { return plan.parameters == parameters && plan.state == state; };
    if (is(Storage::fp16, Storage::fp16)) return step(Half{}, Half{});
    if (is(Storage::bf16, Storage::bf16)) return step(Brain{}, Brain{});
    if (is(Storage::fp32, Storage::fp16)) return step(Single{}, Half{});
    if (is(Storage::fp32, Storage::bf16)) return step(Single{}, Brain{});
    if (is(Storage::fp32, Storage::fp32)) return adam_step(where, tables, settings, norm);
    throw std::invalid_argument("no kernel serves these formats");
}

void gather(const Where& where, int word_bytes, const void* in, const int64_t* indices, void* out, int64_t count, int64_t size) {
    const Device device(where.device);
    const auto copy = [&](auto word) {
        using Word = decltype(word);
        run(gather_rows<Word>, gather_blocks(count, size), THREADS, where, static_cast<const Word*>(in), indices, static_cast<Word*>(out), count, size);
    };
    word_bytes == 2 ? copy(uint16_t{}) : copy(float{});
}

void statistics(const Where& where, Storage storage, const StatisticsSettings& settings) {
    const Device device(where.device);
    const int threads = static_cast<int>(divided_up(least(settings.batch_size, STATISTICS_THREADS), 32) * 32);
    with_format(storage, [&](auto format) {
        run(advantage_statistics<decltype(format)>, minibatches(settings.samples, settings.batch_size, settings.epochs), threads, where, settings);
    });
}

void gae(const Where& where, Storage storage, const GaeSettings& settings) {
    const Device device(where.device);
    with_format(storage, [&](auto format) { run(gae<decltype(format)>, divided_up(settings.envs, THREADS), THREADS, where, settings); });
}

int64_t loss_workspace(int64_t count, int64_t size) { return gaussian_workspace(count, size); }

void losses(const Where& where, Head head, Storage storage, Storage compute, const LossSettings& settings) {
    const Device device(where.device);
    const auto launch = [&](auto stored, auto computed) {
        using F = decltype(stored);
        using C = decltype(computed);
        if (head == Head::bernoulli) throw std::invalid_argument("no kernel serves a Bernoulli distribution");
        run(head == Head::gaussian ? gaussian_losses<F, C> : categorical_losses<F, C>, 1, loss_threads(settings.count), where, settings);
    };
    if (storage != Storage::fp32 && storage != compute) throw std::invalid_argument("no kernel serves these formats");
    if (storage == Storage::fp16) return launch(Half{}, Half{});
    if (storage == Storage::bf16) return launch(Brain{}, Brain{});
    with_format(compute, [&](auto computed) { launch(Single{}, computed); });
}

int device_count() {
#ifdef __CUDACC__
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
#else
    return 1;
#endif
}

}  // namespace sb3_fp16
