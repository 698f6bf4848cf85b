// Rows of an array by index, as words of 16 or 32 bits: the observations of a minibatch. One thread copies PACK words;
// rows whose length keeps them aligned move 16 bytes at a time.
#pragma once

#include "formats.cuh"
#include "reduce.cuh"

namespace sb3_fp16 {

SB3_FP16_FUNCTION int64_t packs_of(int64_t size) { return (size + PACK - 1) / PACK; }

SB3_FP16_FUNCTION int64_t gather_blocks(int64_t count, int64_t size) { return (count * packs_of(size) + THREADS - 1) / THREADS; }

// out[b][c] = in[indices[b]][c] for b < count, c < size.
template <class Word>
__global__ void __launch_bounds__(THREADS) gather_rows(const Word* in, const int64_t* indices, Word* out, int64_t count, int64_t size) {
    const int64_t packs = packs_of(size), i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t b = i / packs, column = i % packs * PACK;
    if (b >= count) return;
    write_pack(out + b * size + column, size - column, read_pack(in + indices[b] * size + column, size - column));
}

}  // namespace sb3_fp16
