// Threads that share the large loops of one update. They end with it, so that a process may fork between updates.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace sb3_fp16 {

class Workers {
public:
    static constexpr int64_t WORTH_WAKING = 1 << 25;  // floating-point operations

    explicit Workers(int count) {
        for (int i = 1; i < count; ++i) threads.emplace_back([this, i] { serve(i); });
    }

    ~Workers() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            ends = true;
        }
        begins.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    // Calls task(first, last) for parts of [0, items) that begin at multiples of `grain`; `work` is what an item costs in
    // floating-point operations. Which thread takes a part must not matter to the result.
    template <class Task>
    void each(int64_t items, int64_t grain, int64_t work, const Task& task) {
        if (threads.empty() || items * work < WORTH_WAKING) return task(int64_t{0}, items);
        const int64_t parts = static_cast<int64_t>(threads.size()) + 1;
        const int64_t grains = (items + grain - 1) / grain, each_part = (grains + parts - 1) / parts * grain;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            context = &task;
            call = [](const void* of, int64_t first, int64_t last) { (*static_cast<const Task*>(of))(first, last); };
            size = items, part_size = each_part, unfinished = threads.size();
            round.fetch_add(1, std::memory_order_release);
        }
        begins.notify_all();
        task(int64_t{0}, std::min(each_part, items));
        spin_until([this] { return unfinished.load(std::memory_order_acquire) == 0; });
        std::unique_lock<std::mutex> lock(mutex);
        finished.wait(lock, [this] { return unfinished == 0; });
    }

private:
    void serve(int64_t number) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
        while (true) {
            spin_until([&] { return round.load(std::memory_order_acquire) != seen; });
            lock.lock();
            begins.wait(lock, [&] { return ends || round != seen; });
            if (ends) return;
            seen = round;
            const int64_t first = std::min(number * part_size, size), last = std::min(first + part_size, size);
            lock.unlock();
            if (first < last) call(context, first, last);
            lock.lock();
            if (--unfinished == 0) finished.notify_one();
            lock.unlock();
        }
    }

    // The next loop mostly follows at once: waking a thread that sleeps would take longer than to wait for it.
    template <class Condition>
    static void spin_until(Condition holds) {
        using Clock = std::chrono::steady_clock;
        const Clock::time_point end = Clock::now() + std::chrono::microseconds(50);
        while (!holds() && Clock::now() < end) {
        }
    }

    std::vector<std::thread> threads;
    std::mutex mutex;
    std::condition_variable begins, finished;
    const void* context = nullptr;
    void (*call)(const void*, int64_t, int64_t) = nullptr;
    int64_t size = 0, part_size = 0;
    std::atomic<size_t> unfinished{0};
    std::atomic<uint64_t> round{0};
    bool ends = false;
};

}  // namespace sb3_fp16
