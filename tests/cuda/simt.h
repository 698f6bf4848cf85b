// Runs CUDA kernels on the CPU, under plain g++ and without CUDA's headers. For tests.
//
// One block runs at a time. Each of its threads has a stack and runs until it waits for others; a seed decides who goes
// on then, and in which order the blocks come. So a missing barrier, or a block that relies on another block of its
// launch, gives wrong numbers under some seed. Shared memory is full of 0xff (NaN, -1) when a block begins.
//
// Stricter than a GPU: all threads of a block meet at one line with __syncthreads; all lanes of a warp that have not
// returned meet at one line with a warp function, and its mask names them; a lane reads only lanes that are there. A
// breach is a std::runtime_error that names block and thread. With -fsanitize=thread, threads of a block that touch the
// same memory with no barrier in between are reported, too.
//
// All thread_local variables of the program or shared library that includes this file count as shared memory: it must
// have no other ones, and must not link the C and C++ libraries statically. Libraries for one process are compiled with
// -fvisibility=hidden, lest their kernels of one name share variables. One launch runs at a time. A kernel in which a
// thread loops until another one has written never ends.
#pragma once

#ifdef __CUDACC__
#error "simt.h is for compilers that do not know CUDA"
#endif

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_ignore_thread_begin();
extern "C" void __tsan_ignore_thread_end();
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// A section with a name would be tidier, but GCC 12 leaves the variables of templates out of it and says nothing.
#define __shared__ thread_local

// Defines `type* const name`, the dynamic shared memory. Where kernels are compiled by nvcc it is:
//     extern __shared__ __align__(16) unsigned char sb3_fp16_dynamic_shared[];
//     type* const name = reinterpret_cast<type*>(sb3_fp16_dynamic_shared)
#define SB3_FP16_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(simt::dynamic_shared())

// Stacks are exchanged behind the sanitizers' backs: instrumented code would keep its books on the wrong one.
#define SB3_FP16_UNWATCHED __attribute__((noinline, no_sanitize("address", "thread")))

// Libraries loaded by one process share nothing of this.
#pragma GCC visibility push(hidden)

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline uint3 threadIdx{}, blockIdx{};
inline dim3 blockDim, gridDim;

namespace simt {

constexpr int WARP = 32;

// A stack, and where on it to go on. That of the launching program has no memory of its own.
struct Stack {
    void* point[5] = {};  // of __builtin_setjmp
    const void* bottom = nullptr;
    size_t size = 0;
    bool entered = false;
};

class OwnStack : public Stack {
public:
    // Below the stack lies memory that nothing may touch, so that an overflow ends the program.
    OwnStack() {
        memory = mmap(nullptr, GUARD + BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        bottom = static_cast<char*>(memory) + GUARD, size = BYTES;
        if (mprotect(static_cast<char*>(memory) + GUARD, BYTES, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    }
    ~OwnStack() { munmap(memory, GUARD + BYTES); }
    OwnStack(const OwnStack&) = delete;
    OwnStack& operator=(const OwnStack&) = delete;

private:
    static constexpr size_t GUARD = 64 << 10, BYTES = 256 << 10;
    void* memory;
};

// The system's way onto a new stack costs a system call, so a stack is entered once and then kept.
SB3_FP16_UNWATCHED inline void enter(Stack& stack, void (*function)()) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = const_cast<void*>(stack.bottom), context.uc_stack.ss_size = stack.size;
    context.uc_link = nullptr;
    makecontext(&context, function, 0);
    stack.entered = true;
    setcontext(&context);
}

SB3_FP16_UNWATCHED inline void go_on(Stack& stack) { __builtin_longjmp(stack.point, 1); }

// Leaves one stack for another, and returns when that one is left for the first. `function` must not return.
SB3_FP16_UNWATCHED inline void exchange_stacks(Stack& from, Stack& to, void (*function)()) {
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, to.bottom, to.size);
#endif
    asm volatile("" ::: "memory");
    if (!__builtin_setjmp(from.point)) {
        if (to.entered)
            go_on(to);
        else
            enter(to, function);
    }
    asm volatile("" ::: "memory");
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, &to.bottom, &to.size);
#endif
}

#ifdef __SANITIZE_THREAD__

// A CUDA thread as the thread sanitizer knows it. To make one takes long, so they are kept.
class Identity {
public:
    void create() { fiber = __tsan_create_fiber(0); }
    void find() { fiber = __tsan_get_current_fiber(); }
    SB3_FP16_UNWATCHED void assume() const { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }

private:
    void* fiber = nullptr;
};

// What a thread does before publish() comes before what another one does after learn().
class Clock {
public:
    void publish() { __tsan_release(&address); }
    void learn() { __tsan_acquire(&address); }

private:
    char address = 0;
};

// The simulator's own memory needs no barriers: its threads take turns.
class Unseen {
public:
    Unseen() { __tsan_ignore_thread_begin(); }
    ~Unseen() { __tsan_ignore_thread_end(); }
    Unseen(const Unseen&) = delete;
    Unseen& operator=(const Unseen&) = delete;
};

#else

struct Identity {
    void create() {}
    void find() {}
    void assume() const {}
};

struct Clock {
    void publish() {}
    void learn() {}
};

struct Unseen {
    Unseen() {}  // makes a variable count as used
};

#endif

// SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
class Random {
public:
    explicit Random(uint64_t seed) : state(seed) {}

    size_t below(size_t bound) {
        uint64_t word = state += 0x9e3779b97f4a7c15u;
        word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
        word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
        return static_cast<size_t>((word ^ (word >> 31)) % bound);
    }

    template <class T>
    void shuffle(std::vector<T>& values) {
        for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
    }

private:
    uint64_t state;
};

// The line of a call, where it is the default of the called function's parameter.
struct Caller {
    const char* file;
    int line;
    Caller(const char* file_ = __builtin_FILE(), int line_ = __builtin_LINE()) : file(file_), line(line_) {}
};

class Site {
public:
    Site() = default;
    Site(const char* function_, const Caller& caller_) : function(function_), caller(caller_) {}

    bool operator==(const Site& other) const {
        return caller.line == other.caller.line && same(caller.file, other.caller.file) &&
               same(function, other.function);
    }
    std::string text() const {
        const std::string file = caller.file;
        return function + (" at " + file.substr(file.rfind('/') + 1)) + ":" + std::to_string(caller.line);
    }

private:
    static bool same(const char* a, const char* b) { return a == b || !std::strcmp(a, b); }

    const char* function = "";
    Caller caller{"", 0};
};

inline std::string text(const uint3& i) {
    return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

inline uint3 position(uint64_t number, const dim3& extent) {
    const uint64_t row = number / extent.x;
    return {static_cast<unsigned>(number % extent.x), static_cast<unsigned>(row % extent.y),
            static_cast<unsigned>(row / extent.y)};
}

// Thrown in the threads that wait when another one fails, so that what they hold is destroyed.
struct Abandoned {};

// Threads that wait for one another. The clocks take turns, for a thread may be back before all have left.
struct Meeting {
    Site site;  // of who came first
    std::vector<size_t> waiting;
    Clock clocks[2];
    size_t round = 0;
};

struct Warp {
    Meeting meeting;
    std::vector<size_t> ready;         // threads that can go on
    uint32_t live = 0, present = 0;    // lanes that have not returned; lanes of the last meeting
    uint32_t masks[WARP] = {};         // as the waiting lanes gave them
    uint64_t given[WARP], seen[WARP];  // values of the waiting lanes; those of the last meeting
};

inline thread_local char a_shared_variable = 0;

// Begin and size of the memory that holds the __shared__ variables, and this one with them.
inline std::pair<void*, size_t> shared_variables() {
    const auto visit = [](dl_phdr_info* module, size_t, void* result) {
        const auto begin = reinterpret_cast<uintptr_t>(module->dlpi_tls_data);
        const auto offset = reinterpret_cast<uintptr_t>(&a_shared_variable) - begin;
        for (int i = 0; i < module->dlpi_phnum; ++i) {
            const auto& segment = module->dlpi_phdr[i];
            if (!begin || segment.p_type != PT_TLS || offset >= segment.p_memsz) continue;
            *static_cast<std::pair<void*, size_t>*>(result) = {module->dlpi_tls_data, segment.p_memsz};
            return 1;
        }
        return 0;
    };
    std::pair<void*, size_t> found;
    if (!dl_iterate_phdr(visit, &found)) throw std::logic_error("the __shared__ variables were not found");
    return found;
}

class Simulator {
public:
    void launch(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()>& kernel, uint64_t seed) {
        const Unseen unseen;
        const Running running(*this, kernel);
        const uint64_t size = uint64_t{block.x} * block.y * block.z, blocks = uint64_t{grid.x} * grid.y * grid.z;
        if (!size || size > 1024 || !blocks)
            throw std::invalid_argument(std::to_string(blocks) + " blocks of " + std::to_string(size) + " threads");
        gridDim = grid, blockDim = block;
        random = Random(seed), shuffles = seed != 0;
        dynamic.reset(new unsigned char[dynamic_bytes]);  // no more, so that the address sanitizer sees where it ends
        const std::pair<void*, size_t> variables = shared_variables();
        std::vector<uint64_t> order(blocks);
        std::iota(order.begin(), order.end(), uint64_t{0});
        if (shuffles) random.shuffle(order);
        for (const uint64_t number : order) {
            std::memset(variables.first, 0xff, variables.second);
            std::memset(dynamic.get(), 0xff, dynamic_bytes);
            blockIdx = position(number, grid);
            begin_block(size);
            run_block();
        }
    }

    void* dynamic_memory() const { return dynamic.get(); }
    int lane() const { return static_cast<int>(current % WARP); }

    // Waits for all threads of the block.
    void meet_block(const Site& site) {
        const Unseen unseen;
        check_running(site);
        if (returned) refuse(site.text() + " waits for a thread that has returned");
        Clock& clock = barrier.clocks[barrier.round % 2];
        clock.publish();
        join(barrier, site);
        if (barrier.waiting.size() == stack_of.size()) part(barrier);
        wait();
        clock.learn();
    }

    // Waits for all lanes of the warp that have not returned. What they give can be seen until the next meeting. Only
    // __syncwarp orders memory.
    void meet_warp(const Site& site, unsigned mask, uint64_t given, bool orders_memory = false) {
        const Unseen unseen;
        check_running(site);
        Warp& warp = warps[current / WARP];
        Clock& clock = warp.meeting.clocks[warp.meeting.round % 2];
        if (orders_memory) clock.publish();
        warp.masks[lane()] = mask, warp.given[lane()] = given;
        join(warp.meeting, site);
        part_if_complete(warp);
        wait();
        if (orders_memory) clock.learn();
    }

    uint64_t seen(const Site& site, int source) const {
        const Unseen unseen;
        const Warp& warp = warps[current / WARP];
        if (!(warp.present >> source & 1u))
            refuse(site.text() + " reads lane " + std::to_string(source) + ", which is not there");
        return warp.seen[source];
    }

    // The lanes that gave something other than 0.
    unsigned ballot() const {
        const Unseen unseen;
        const Warp& warp = warps[current / WARP];
        unsigned lanes = 0;
        for (int i = 0; i < WARP; ++i)
            if (warp.present >> i & 1u && warp.seen[i]) lanes |= 1u << i;
        return lanes;
    }

    [[noreturn]] void refuse(const std::string& reason) const { throw std::runtime_error(reason + where(current)); }

private:
    class Running {
    public:
        Running(Simulator& simulator_, const std::function<void()>& kernel) : simulator(simulator_) {
            if (simulator.body) throw std::logic_error("a launch inside a launch");
            simulator.body = &kernel;
            simulator.launcher_identity.find();
        }
        ~Running() { simulator.body = nullptr, simulator.dynamic.reset(); }
        Running(const Running&) = delete;
        Running& operator=(const Running&) = delete;

    private:
        Simulator& simulator;
    };

    static std::string where(size_t number) {
        return " (block " + text(blockIdx) + ", thread " + text(position(number, blockDim)) + ")";
    }

    void check_running(const Site& site) const {
        if (!body) throw std::logic_error(site.text() + " outside a launch");
    }

    void begin_block(size_t size) {
        barrier = {}, warps.assign((size + WARP - 1) / WARP, {}), stack_of.assign(size, nullptr);
        ready_warps.clear(), returned = 0, abandons = false;
        for (; identities.size() < size; identities.back().create()) identities.emplace_back();
        for (size_t number = size; number-- > 0;) {
            warps[number / WARP].live |= 1u << number % WARP;
            make_ready(number);
        }
        if (shuffles) random.shuffle(ready_warps);
        turns = size_t{1} << random.below(13);
        begun.publish();
    }

    void run_block() {
        while (!ready_warps.empty() && !error) resume(next_thread());
        if (!error && returned < stack_of.size()) error = std::make_exception_ptr(deadlock());
        abandons = error != nullptr;
        for (size_t number = 0; number < stack_of.size(); ++number)
            while (stack_of[number]) resume(number);
        finished.learn();
        if (error) std::rethrow_exception(std::exchange(error, nullptr));
    }

    void make_ready(size_t number) {
        Warp& warp = warps[number / WARP];
        if (warp.ready.empty()) ready_warps.push_back(number / WARP);
        warp.ready.push_back(number);
    }

    // Any ready thread of the warp that had the last turn, or now and then of any warp. Blocks differ in how often that
    // is: some errors show when a warp runs far ahead, others when lanes of all warps mingle.
    size_t next_thread() {
        const auto put_last = [&](std::vector<size_t>& of) { std::swap(of[random.below(of.size())], of.back()); };
        if (shuffles && !random.below(turns)) put_last(ready_warps);
        std::vector<size_t>& ready = warps[ready_warps.back()].ready;
        if (shuffles) put_last(ready);
        const size_t number = ready.back();
        ready.pop_back();
        if (ready.empty()) ready_warps.pop_back();
        return number;
    }

    // Runs a thread until it waits or ends.
    void resume(size_t number) {
        if (!stack_of[number]) stack_of[number] = idle_stack();
        current = number, threadIdx = position(number, blockDim);
        exchange(identities[number], launcher, *stack_of[number]);
    }

    Stack* idle_stack() {
        if (idle.empty()) idle.push_back(stacks.emplace_back(new OwnStack).get());
        Stack* stack = idle.back();
        idle.pop_back();
        return stack;
    }

    SB3_FP16_UNWATCHED static void exchange(const Identity& identity, Stack& from, Stack& to) {
        identity.assume();
        exchange_stacks(from, to, serve);
    }

    // What each stack does: run one thread after the other.
    SB3_FP16_UNWATCHED inline static void serve();

    Stack& run_thread() {
        begun.learn();
        try {
            (*body)();
            count_return();
        } catch (const Abandoned&) {
        } catch (...) {
            const Unseen unseen;
            if (!error) error = std::current_exception();
        }
        const Unseen unseen;
        finished.publish();
        idle.push_back(stack_of[current]);
        return *std::exchange(stack_of[current], nullptr);
    }

    void count_return() {
        const Unseen unseen;
        ++returned;
        if (!barrier.waiting.empty()) refuse("a thread returns while others wait in " + barrier.site.text());
        Warp& warp = warps[current / WARP];
        warp.live &= ~(1u << lane());
        part_if_complete(warp);
    }

    void join(Meeting& meeting, const Site& site) {
        if (meeting.waiting.empty()) meeting.site = site;
        if (!(meeting.site == site)) refuse(site.text() + " while others wait in " + meeting.site.text());
        meeting.waiting.push_back(current);
    }

    void part(Meeting& meeting) {
        std::for_each(meeting.waiting.rbegin(), meeting.waiting.rend(), [this](size_t number) { make_ready(number); });
        meeting.waiting.clear();
        ++meeting.round;
    }

    void part_if_complete(Warp& warp) {
        const std::vector<size_t>& waiting = warp.meeting.waiting;
        if (waiting.empty() || waiting.size() != static_cast<size_t>(__builtin_popcount(warp.live))) return;
        for (const size_t number : waiting)
            if (warp.live & ~warp.masks[number % WARP]) {
                const std::string call = warp.meeting.site.text();
                throw std::runtime_error("the mask of " + call + " leaves out live lanes" + where(number));
            }
        std::memcpy(warp.seen, warp.given, sizeof warp.seen);
        warp.present = warp.live;
        part(warp.meeting);
    }

    void wait() {
        exchange(launcher_identity, *stack_of[current], launcher);
        if (abandons) throw Abandoned{};
    }

    std::runtime_error deadlock() const {
        std::vector<const Meeting*> meetings{&barrier};
        for (const Warp& warp : warps) meetings.push_back(&warp.meeting);
        std::map<std::string, size_t> counts;
        size_t first = stack_of.size();
        for (const Meeting* meeting : meetings) {
            if (meeting->waiting.empty()) continue;
            counts[meeting->site.text()] += meeting->waiting.size();
            first = std::min(first, *std::min_element(meeting->waiting.begin(), meeting->waiting.end()));
        }
        std::string reason = "deadlock:";
        for (const auto& [site, count] : counts) reason += " " + std::to_string(count) + " wait in " + site + ",";
        return std::runtime_error(reason + " the first of them" + where(first));
    }

    const std::function<void()>* body = nullptr;  // of the launch that runs
    Random random{0};
    bool shuffles = false, abandons = false;
    size_t turns = 1;  // mean number for which a warp stays the one to go on
    std::unique_ptr<unsigned char[]> dynamic;
    std::vector<Stack*> stack_of;  // threads that have begun and not returned
    std::vector<Warp> warps;
    Meeting barrier;
    std::vector<size_t> ready_warps;  // those of which threads can go on
    size_t current = 0, returned = 0;
    std::exception_ptr error;  // the first
    std::vector<std::unique_ptr<OwnStack>> stacks;
    std::vector<Stack*> idle;
    Stack launcher{{}, nullptr, 0, true};
    std::vector<Identity> identities;  // of the block's threads
    Identity launcher_identity;
    Clock begun, finished;  // a block
};

inline Simulator simulator;

void Simulator::serve() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &simulator.launcher.bottom, &simulator.launcher.size);
#endif
    while (true) exchange(simulator.launcher_identity, simulator.run_thread(), simulator.launcher);
}

inline void* dynamic_shared() { return simulator.dynamic_memory(); }

// Calls body() once for each thread, in an order that follows from the seed; from 0, blocks and threads ascend. What a
// thread throws ends the launch and is thrown here; the next launch starts afresh.
inline void launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()>& body,
                   uint64_t seed = 0) {
    simulator.launch(grid, block, dynamic_shared_bytes, body, seed);
}

// The value of the lane that source(lane, first, end) names; first and end bound the lane's group of `width`.
template <class T, class Source>
T shuffle(const Site& site, unsigned mask, T value, int width, const Source& source) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= sizeof(uint64_t), "8 bytes at most");
    if (width < 1 || width > WARP || (width & (width - 1)))
        simulator.refuse(site.text() + " in groups of " + std::to_string(width));
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    simulator.meet_warp(site, mask, word);
    const int lane = simulator.lane(), first = lane & ~(width - 1);
    word = simulator.seen(site, source(lane, first, first + width));
    std::memcpy(&value, &word, sizeof value);
    return value;
}

inline unsigned ballot(const Site& site, unsigned mask, bool vote) {
    simulator.meet_warp(site, mask, vote);
    return simulator.ballot();
}

}  // namespace simt

inline void __syncthreads(simt::Caller caller = {}) { simt::simulator.meet_block({"__syncthreads", caller}); }

inline void __syncwarp(unsigned mask = ~0u, simt::Caller caller = {}) {
    simt::simulator.meet_warp({"__syncwarp", caller}, mask, 0, true);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = simt::WARP, simt::Caller caller = {}) {
    return simt::shuffle({"__shfl_sync", caller}, mask, value, width,
                         [=](int, int first, int end) { return first + (source & (end - first - 1)); });
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = simt::WARP, simt::Caller caller = {}) {
    return simt::shuffle({"__shfl_xor_sync", caller}, mask, value, width, [=](int lane, int, int end) {
        const int other = lane ^ (bits & (simt::WARP - 1));
        return other < end ? other : lane;
    });
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = simt::WARP, simt::Caller caller = {}) {
    return simt::shuffle({"__shfl_down_sync", caller}, mask, value, width, [=](int lane, int, int end) {
        return delta < static_cast<unsigned>(end - lane) ? lane + static_cast<int>(delta) : lane;
    });
}

inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Caller caller = {}) {
    return simt::ballot({"__ballot_sync", caller}, mask, predicate != 0);
}

inline int __any_sync(unsigned mask, int predicate, simt::Caller caller = {}) {
    return simt::ballot({"__any_sync", caller}, mask, predicate != 0) != 0;
}

inline void __threadfence() {}

// Whole numbers only: a sum of floats would depend on the order.
template <class T>
T atomicAdd(T*, T) = delete;

inline int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }

inline unsigned atomicAdd(unsigned* address, unsigned value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

#pragma GCC visibility pop
