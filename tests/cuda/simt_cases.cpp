// Kernels for test_simt.py, right ones and the same ones with an error planted. The program runs the case that its
// argument names under the seeds 0 to 19 and prints a line for each: right, wrong, or the simulator's complaint.
#include "simt.h"

#include <cstdio>

#include "../../cuda/numerics.h"

namespace {

constexpr unsigned FULL = 0xffffffffu;
constexpr int LANES = 32, MOST = 1024;
using Floats = std::vector<float>;

int thread() { return static_cast<int>(threadIdx.x); }
int threads() { return static_cast<int>(blockDim.x); }

// 1, 2, …: sums of a few thousand are exact in any order.
Floats numbers(int count) {
    Floats values(static_cast<size_t>(count));
    std::iota(values.begin(), values.end(), 1.0f);
    return values;
}

float sum_to(int count) { return static_cast<float>(count) * static_cast<float>(count + 1) / 2; }

// Sum of a warp that may be short, in lane 0.
__device__ float warp_sum(float value) {
    const int lane = thread() % LANES, last = std::min(LANES, threads() - thread() + lane) - 1;
    for (int step = LANES / 2; step > 0; step /= 2) {
        const float other = __shfl_sync(FULL, value, std::min(lane + step, last));
        if (lane + step <= last) value += other;
    }
    return value;
}

// Sums of `rounds` rows in turn, each through the same shared memory.
template <bool BEFORE_READ = true, bool BEFORE_REUSE = true>
__global__ void __launch_bounds__(MOST) row_sums(const float* x, int columns, int rounds, float* sums) {
    __shared__ float of_warp[LANES];
    for (int row = 0; row < rounds; ++row) {
        float value = 0.0f;
        for (int j = thread(); j < columns; j += threads()) value += x[j] + static_cast<float>(row);
        value = warp_sum(value);
        if (thread() % LANES == 0) of_warp[thread() / LANES] = value;
        if (BEFORE_READ) __syncthreads();
        if (thread() == 0) {
            value = 0.0f;
            for (int warp = 0; warp * LANES < threads(); ++warp) value += of_warp[warp];
            sums[static_cast<int>(blockIdx.x) * rounds + row] = value;
        }
        if (BEFORE_REUSE) __syncthreads();
    }
}

template <bool BEFORE_READ = true, bool BEFORE_REUSE = true>
bool row_sums_hold(unsigned block, int columns, uint64_t seed) {
    constexpr unsigned BLOCKS = 3;
    constexpr int ROUNDS = 3;
    const Floats x = numbers(columns);
    Floats sums(BLOCKS * ROUNDS, -1.0f);
    const auto kernel = [&] { row_sums<BEFORE_READ, BEFORE_REUSE>(x.data(), columns, ROUNDS, sums.data()); };
    simt::launch(BLOCKS, block, 0, kernel, seed);
    bool holds = true;
    for (size_t i = 0; i < sums.size(); ++i)
        holds &= sums[i] == sum_to(columns) + static_cast<float>(static_cast<int>(i) % ROUNDS * columns);
    return holds;
}

bool sums_of_odd_sizes(uint64_t seed) {
    bool holds = true;
    for (const unsigned block : {1u, 7u, 33u, 255u, 1024u})
        for (const int columns : {1, 333}) holds &= row_sums_hold(block, columns, seed);
    return holds;
}

template <bool BARRIER>
bool reversal(uint64_t seed) {
    const Floats x = numbers(64);
    Floats reversed(64);
    const auto kernel = [&] {
        SB3_FP16_DYNAMIC_SHARED(float, tile);
        tile[threadIdx.x] = x[threadIdx.x];
        if (BARRIER) __syncthreads();
        reversed[threadIdx.x] = tile[63 - threadIdx.x];
    };
    simt::launch(1, 64, 64 * sizeof(float), kernel, seed);
    return std::equal(x.begin(), x.end(), reversed.rbegin());
}

// What one lane of a warp writes and another one reads.
template <bool BARRIER>
bool broadcast(uint64_t seed) {
    int read[LANES];
    const auto kernel = [&] {
        __shared__ int message;
        if (thread() == 0) message = 3;
        if (BARRIER) __syncwarp();
        read[threadIdx.x] = message;
    };
    simt::launch(1, LANES, 0, kernel, seed);
    return std::count(read, read + LANES, 3) == LANES;
}

// Two variables that belong together, written at different times, so that only a warp in between sees them differ.
template <bool BARRIER>
bool pair(uint64_t seed) {
    bool differ = false;
    const auto kernel = [&] {
        __shared__ int first, second;
        if (thread() == 0) first = second = 0;
        __syncthreads();
        if (thread() == 0) first = 1;
        __syncwarp();
        if (thread() == 0) second = 1;
        if (BARRIER) __syncthreads();
        if (thread() == LANES) differ = first != second;
    };
    simt::launch(1, 2 * LANES, 0, kernel, seed);
    return !differ;
}

// The reader is many shuffles behind the writer, so that only a warp which runs far ahead comes too early.
template <bool BARRIER>
bool late_reader(uint64_t seed) {
    float read = 0.0f;
    const auto kernel = [&] {
        __shared__ float message;
        const bool writes = thread() < LANES;
        if (thread() == 0) message = 0.0f;
        __syncthreads();
        for (int i = 0; i < (writes ? 1 : 24); ++i) __shfl_xor_sync(FULL, 1, 1);
        if (thread() == 0) message = 1.0f;
        if (BARRIER) __syncthreads();
        if (thread() == LANES) read = message;
    };
    simt::launch(1, 2 * LANES, 0, kernel, seed);
    return read == 1.0f;
}

// In a template, outside of one, and dynamic.
template <class T>
__device__ T* counter() {
    __shared__ T count;
    return &count;
}

__device__ int* plain_counter() {
    __shared__ int count;
    return &count;
}

__device__ int* dynamic_counter() {
    SB3_FP16_DYNAMIC_SHARED(int, count);
    return count;
}

bool fresh_memory(uint64_t seed) {
    int fresh = 0;
    const auto kernel = [&] {
        for (int* const memory : {counter<int>(), plain_counter(), dynamic_counter()}) {
            fresh += *memory == -1;
            __syncthreads();
            *memory = 0;
        }
    };
    simt::launch(2, 40, sizeof(int), kernel, seed);
    return fresh == 2 * 40 * 3;
}

template <bool ZEROED, int* (*COUNTER)()>
bool count(uint64_t seed) {
    int counted[2] = {};
    const auto kernel = [&] {
        if (ZEROED && thread() == 0) *COUNTER() = 0;
        __syncthreads();
        atomicAdd(COUNTER(), 1);
        __syncthreads();
        if (thread() == 0) counted[blockIdx.x] = *COUNTER();
    };
    simt::launch(2, 40, sizeof(int), kernel, seed);
    return counted[0] == 40 && counted[1] == 40;
}

template <unsigned MASK>
bool neighbour(uint64_t seed) {
    int got[LANES];
    simt::launch(1, LANES, 0, [&] { got[threadIdx.x] = __shfl_xor_sync(MASK, thread(), 1); }, seed);
    bool holds = true;
    for (int i = 0; i < LANES; ++i) holds &= got[i] == (i ^ 1);
    return holds;
}

bool lines_differ(uint64_t seed) {
    const auto kernel = [] {
        if (thread() < LANES)
            __syncthreads();
        else
            __syncthreads();
    };
    simt::launch(2, 2 * LANES, 0, kernel, seed);
    return true;
}

bool barrier_for_some(uint64_t seed) {
    const auto kernel = [] {
        if (thread() != 5) __syncthreads();
        __syncthreads();
    };
    simt::launch(2, LANES, 0, kernel, seed);
    return true;
}

bool early_return(uint64_t seed) {
    const auto kernel = [] {
        if (thread() == 40) return;
        __syncthreads();
    };
    simt::launch(2, 2 * LANES, 0, kernel, seed);
    return true;
}

bool deadlock(uint64_t seed) {
    const auto kernel = [] {
        if (thread() % 2)
            __syncwarp();
        else
            __syncthreads();
    };
    simt::launch(1, LANES, 0, kernel, seed);
    return true;
}

bool absent_lane(uint64_t seed) {
    simt::launch(1, 40, 0, [] { __shfl_down_sync(FULL, 1.0f, 16); }, seed);
    return true;
}

bool groups_of_three(uint64_t seed) {
    simt::launch(1, LANES, 0, [] { __shfl_sync(FULL, 1.0f, 0, 3); }, seed);
    return true;
}

// Prefix sums over blocks: SPLIT into launches, or in one, where a block reads what another one writes.
template <bool SPLIT>
bool block_chain(uint64_t seed) {
    int sums[4] = {};
    for (unsigned first = 0; first < 4; first += SPLIT ? 1 : 4) {
        const auto kernel = [&] {
            const unsigned block = first + blockIdx.x;
            sums[block] = 1 + (block ? sums[block - 1] : 0);
        };
        simt::launch(SPLIT ? 1 : 4, 1, 0, kernel, seed);
    }
    return sums[3] == 4;
}

// Groups of 16 lanes: a sum, a shift that stops at the group's end, a lane chosen in the group, and one that may lie in
// an earlier group but not in a later one.
bool groups(uint64_t seed) {
    int sums[2 * LANES], shifted[2 * LANES], chosen[2 * LANES], crossed[2 * LANES];
    const auto kernel = [&] {
        int sum = thread();
        for (int bit = 8; bit; bit /= 2) sum += __shfl_xor_sync(FULL, sum, bit, 16);
        sums[threadIdx.x] = sum;
        shifted[threadIdx.x] = __shfl_down_sync(FULL, thread(), 3, 16);
        chosen[threadIdx.x] = __shfl_sync(FULL, thread(), 18, 16);
        crossed[threadIdx.x] = __shfl_xor_sync(FULL, thread(), 16, 16);
    };
    simt::launch(1, 2 * LANES, 0, kernel, seed);
    bool holds = true;
    for (int i = 0; i < 2 * LANES; ++i) {
        const int first = i - i % 16;
        holds &= sums[i] == 16 * first + 120 && shifted[i] == (i % 16 < 13 ? i + 3 : i) && chosen[i] == first + 2;
        holds &= crossed[i] == (i & 16 ? i - 16 : i);
    }
    return holds;
}

// Lanes that have returned neither vote nor are waited for.
bool votes(uint64_t seed) {
    unsigned ballots[LANES] = {};
    bool any[LANES] = {}, none[LANES] = {};
    const auto kernel = [&] {
        if (thread() >= 24) return;
        ballots[threadIdx.x] = __ballot_sync(0x00ffffffu, thread() % 3 == 0);
        any[threadIdx.x] = __any_sync(FULL, thread() == 7);
        none[threadIdx.x] = __any_sync(FULL, thread() == 24);
    };
    simt::launch(1, LANES, 0, kernel, seed);
    bool holds = true;
    for (int i = 0; i < 24; ++i) holds &= ballots[i] == 0x00249249u && any[i] && !none[i];
    return holds;
}

bool positions(uint64_t seed) {
    const dim3 grid(2, 3, 2), block(5, 3, 2);
    std::vector<int> visits(12 * 30);
    const auto kernel = [&] {
        const unsigned of_block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const unsigned of_thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        __syncthreads();
        ++visits[of_block * 30 + of_thread];
    };
    simt::launch(grid, block, 0, kernel, seed);
    return std::count(visits.begin(), visits.end(), 1) == 12 * 30;
}

bool numerics(uint64_t seed) {
    float results[LANES];
    simt::launch(1, LANES, 0, [&] { results[thread()] = sb3_fp16::tangent(static_cast<float>(thread()) / 8); }, seed);
    bool holds = true;
    for (int i = 0; i < LANES; ++i) holds &= results[i] == sb3_fp16::tangent(static_cast<float>(i) / 8);
    return holds;
}

std::vector<unsigned> order_of(uint64_t seed) {
    std::vector<unsigned> order;
    simt::launch(10, 10, 0, [&] { order.push_back(blockIdx.x * 10 + threadIdx.x); }, seed);
    return order;
}

bool order(uint64_t seed) {
    const std::vector<unsigned> found = order_of(seed), again = order_of(seed);
    return found == again && std::is_sorted(found.begin(), found.end()) == (seed == 0);
}

struct Held {
    int& count;
    explicit Held(int& count_) : count(count_) { ++count; }
    ~Held() { --count; }
};

// An exception of the body's own reaches the caller, what waiting threads hold is destroyed, and launches go on.
bool exceptions(uint64_t seed) {
    int held = 0;
    bool caught = false;
    const auto kernel = [&] {
        const Held one(held);
        if (thread() == 20) throw std::out_of_range("the body's own");
        __syncthreads();
    };
    try {
        simt::launch(2, 2 * LANES, 0, kernel, seed);
    } catch (const std::out_of_range&) {
        caught = true;
    }
    try {
        early_return(seed);
    } catch (const std::runtime_error&) {
        return caught && held == 0 && row_sums_hold(96, 100, seed);
    }
    return false;
}

template <class Error, class Call>
bool refuses(const Call& call) {
    try {
        call();
    } catch (const Error&) {
        return true;
    }
    return false;
}

bool misuse(uint64_t seed) {
    const auto nothing = [] {};
    return refuses<std::invalid_argument>([&] { simt::launch(0, 32, 0, nothing, seed); }) &&
           refuses<std::invalid_argument>([&] { simt::launch(1, dim3(32, 33), 0, nothing, seed); }) &&
           refuses<std::logic_error>([&] { simt::launch(1, 1, 0, [&] { simt::launch(1, 1, 0, nothing); }, seed); }) &&
           refuses<std::logic_error>([] { __syncthreads(); }) && row_sums_hold(32, 32, seed);
}

// One element beyond the end.
bool out_of_bounds(uint64_t seed) {
    Floats out(LANES);
    const auto kernel = [&] {
        out.data()[thread() + 1] = 1.0f;
    };
    simt::launch(1, LANES, 0, kernel, seed);
    return true;
}

bool out_of_dynamic_bounds(uint64_t seed) {
    const auto kernel = [] {
        SB3_FP16_DYNAMIC_SHARED(float, tile);
        tile[threadIdx.x] = 1.0f;
    };
    simt::launch(1, LANES, (LANES - 1) * sizeof(float), kernel, seed);
    return true;
}

struct Case {
    const char* name;
    bool (*holds)(uint64_t seed);
};

const Case CASES[] = {
    {"sums of odd sizes", sums_of_odd_sizes},
    {"sums", [](uint64_t seed) { return row_sums_hold(96, 100, seed); }},
    {"sums without barrier before read", [](uint64_t seed) { return row_sums_hold<false>(96, 100, seed); }},
    {"sums without barrier before reuse", [](uint64_t seed) { return row_sums_hold<true, false>(96, 100, seed); }},
    {"reversal", reversal<true>},
    {"reversal without barrier", reversal<false>},
    {"broadcast", broadcast<true>},
    {"broadcast without barrier", broadcast<false>},
    {"pair", pair<true>},
    {"pair without barrier", pair<false>},
    {"late reader", late_reader<true>},
    {"late reader without barrier", late_reader<false>},
    {"fresh memory", fresh_memory},
    {"count", count<true, plain_counter>},
    {"count from unset memory", count<false, plain_counter>},
    {"count in a template", count<true, counter<int>>},
    {"count in a template from unset memory", count<false, counter<int>>},
    {"count in dynamic memory", count<true, dynamic_counter>},
    {"count in dynamic memory from unset memory", count<false, dynamic_counter>},
    {"neighbour", neighbour<FULL>},
    {"neighbour with half a mask", neighbour<0x0000ffffu>},
    {"block chain", block_chain<true>},
    {"block chain in one launch", block_chain<false>},
    {"barriers at two lines", lines_differ},
    {"barrier for some threads", barrier_for_some},
    {"early return", early_return},
    {"deadlock", deadlock},
    {"absent lane", absent_lane},
    {"groups of three", groups_of_three},
    {"groups", groups},
    {"votes", votes},
    {"positions", positions},
    {"numerics", numerics},
    {"order", order},
    {"exceptions", exceptions},
    {"misuse", misuse},
    {"out of bounds", out_of_bounds},
    {"out of dynamic bounds", out_of_dynamic_bounds},
};

void run(const Case& of) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        std::string outcome;
        try {
            outcome = of.holds(seed) ? "right" : "wrong";
        } catch (const std::runtime_error& error) {
            outcome = error.what();
        }
        std::printf("%s\n", outcome.c_str());
    }
}

}  // namespace

int main(int, char** arguments) {
    for (const Case& of : CASES)
        if (!std::strcmp(of.name, arguments[1])) return run(of), 0;
    return 1;
}
