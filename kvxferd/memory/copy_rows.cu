/* The kernel that copies rows inside a GPU, and between it and pinned host memory.
 *
 * copy_rows.ptx beside this file is what the driver compiles for its GPU when it loads it; no node needs a
 * compiler. It is made by CUDA 13's
 *
 *     nvcc -ptx -arch=compute_75 -o copy_rows.ptx copy_rows.cu
 *     sed -i 's/^\.version .*$/.version 8.1/' copy_rows.ptx
 *
 * 8.1 is the version of CUDA 12.1, the first that takes parameters of more than 4 KiB, on sm_70 and newer.
 * `kvxferd.memory.cuda` has the parameters' layout too; tests/unit/memory/test_copy_rows.py compares all three.
 */

typedef unsigned long long u64;

/* A kernel's parameters are 32,764 bytes at most. All is passed by value, so that no memory has to outlive the
 * launch. */
constexpr unsigned PAIRS_PER_LAUNCH = 2045;

struct Parameters {
    u64 num_pairs;
    u64 rows; /* of each pair */
    u64 width; /* bytes of a row */
    u64 to_pitch, source_pitch; /* from one row to the next, modulo 2**64: also backwards */
    u64 to[PAIRS_PER_LAUNCH], source[PAIRS_PER_LAUNCH]; /* addresses of first rows */
};
static_assert(sizeof(Parameters) <= 32764, "too large for a kernel's parameters");

/* A longer row is copied in pieces, so that few long rows keep as many threads busy as many short ones. */
constexpr unsigned PIECE_BYTES = 4096;
constexpr unsigned VECTOR_BYTES = sizeof(uint4);
constexpr unsigned WARP = 32;

template <typename Unit>
static __device__ void copy_piece(u64 to, u64 source, unsigned num_bytes, unsigned lane, unsigned lanes) {
    for (unsigned i = lane; i < num_bytes / sizeof(Unit); i += lanes)
        reinterpret_cast<Unit *>(to)[i] = reinterpret_cast<const Unit *>(source)[i];
}

extern "C" __global__ void __launch_bounds__(256) copy_rows(const __grid_constant__ Parameters p) {
    /* So many threads share a piece: one for each vector of it, and no more than a warp. */
    unsigned lanes = 1;
    while (lanes < WARP && u64(lanes) * VECTOR_BYTES < p.width) lanes *= 2;

    const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 step = u64(gridDim.x) * blockDim.x / lanes;
    const unsigned lane = unsigned(thread % lanes);
    const u64 pieces = (p.width + PIECE_BYTES - 1) / PIECE_BYTES; /* of a row */
    const u64 num_pieces = p.num_pairs * p.rows * pieces;
    for (u64 i = thread / lanes; i < num_pieces; i += step) {
        const u64 offset = i % pieces * PIECE_BYTES;
        const u64 row = i / pieces % p.rows, pair = i / pieces / p.rows;
        const u64 to = p.to[pair] + row * p.to_pitch + offset;
        const u64 source = p.source[pair] + row * p.source_pitch + offset;
        const unsigned num_bytes = unsigned(min(p.width - offset, u64(PIECE_BYTES)));
        const u64 all = to | source | num_bytes; /* its low bits show what all are multiples of */
        if (all % sizeof(uint4) == 0)
            copy_piece<uint4>(to, source, num_bytes, lane, lanes);
        else if (all % sizeof(unsigned) == 0)
            copy_piece<unsigned>(to, source, num_bytes, lane, lanes);
        else
            copy_piece<unsigned char>(to, source, num_bytes, lane, lanes);
    }
}
