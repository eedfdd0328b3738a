// The one-pass decode kernel itself: how a block iterates over its split, copies pages, and sums
// values. Comes after tools.cu, which explains it, and stored.cu or reconstructed.cu, which define
// `Scorer`.

struct Work {  // iterates over the tiles of a split, item by item
  int item, tile, end_item, end_tile, b, g, length, stop;
  __device__ Work(const int *starts, int slice) {
    item = starts[2 * slice], tile = starts[2 * slice + 1];
    end_item = starts[2 * slice + 2], end_tile = starts[2 * slice + 3];
  }
  __device__ bool more() const { return item < end_item || (item == end_item && tile < end_tile); }
  __device__ bool begin(const int *lengths, int length_slot, const u64 *slots) {
    b = item / G, g = item % G;
    length = lengths[slots[b] * length_slot + g];
    stop = (length + PAGE - 1) / PAGE;
    if (item == end_item) stop = end_tile;
    return tile < stop;
  }
  __device__ void next() { item++, tile = 0; }
};

struct Pages {  // copies pages ahead, in one thread, in the order in which they are read
  Work work;
  int stage, next;  // buffer and offset of the next page; the offset is looked up a page earlier, or NONE
  u32 phase;
  bool within;      // whether an item has begun
  static constexpr int NONE = -1;
  __device__ Pages(const int *starts, int slice)
      : work(starts, slice), stage(0), next(NONE), phase(0), within(false) {}
  __device__ void look_up(const int *tables, int table_slot, int table_group, const int *lengths,
                          int length_slot, const u64 *slots) {
    next = NONE;
    while (!within) {
      if (!work.more()) return;
      within = work.begin(lengths, length_slot, slots);
      if (!within) work.next();
    }
    next = tables[slots[work.b] * table_slot + (u64)work.g * table_group + work.tile];
    if (++work.tile == work.stop) work.next(), within = false;
  }
  __device__ void copy(u32 room, u32 full, u32 empty, const u8 *arena) {
    if (next == NONE) return;
    wait(empty + 8 * stage, phase ^ 1);
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }"
                 :: "r"(full + 8 * stage), "r"(PAGE_BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2,"
                 " [%3];" :: "r"(room + stage * PAGE_BYTES), "l"(arena + (u64)(u32)next * 64),
                 "r"(PAGE_BYTES), "r"(full + 8 * stage) : "memory");
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Scales of entries `row` and `row + 8` of a page, 0 beyond its `rows` (memory there is undefined).
__device__ __forceinline__ u32 scales_of(const u8 *page, int first, int row, int rows) {
  const int at = first + row * SCALE_ROW;
  u32 x = two_scales(page, at, at + 8 * SCALE_ROW);
  if (rows < PAGE) x &= (row < rows ? 0xFFFF : 0) | (row + 8 < rows ? 0xFFFF0000 : 0);
  return x;
}

// Multiplies a page's values by weights, for one item. It takes all 4 codes of a 4-bit word, both
// codes of two 8-bit words, or the codes of one byte of a 2-bit word.
template <int BITS, class Scales, class Take>
__device__ __forceinline__ void weigh(
    u32 page, u32 weights, const Item &mine, int lane, Scales scales, Take take) {
  const int words = mine.words, half = mine.half;
  const int in = lane / 8, matrix_row = lane % 8, row = 4 * (in / 2) + matrix_row / 2 + 8 * (matrix_row % 2);
  u32 value = page + mine.start + row * (2 * words) + (mine.block * 16 + 8 * (in % 2)) * 2;
  u32 weight = weights + (matrix_row + 8 * (in / 2)) * ROW + (in % 2) * 16;
#pragma unroll (SETS == 1 ? 1 : STEPS)  // with two items per warp registers are scarce
  for (int step = 0; step < STEPS; step++) {
    u32 w[COLS / 8][2];
#pragma unroll
    for (int n = 0; n < COLS / 8; n += 2) {
      u32 x[4];
      load(x, weight + n * 8 * ROW + step * 32);
      w[n][0] = x[0], w[n][1] = x[1], w[n + 1][0] = x[2], w[n + 1][1] = x[3];
    }
    if (WEIGHERS_SCALE) {
      const u32 one = scales(step * 16 + lane % 4), two = scales(step * 16 + 4 + lane % 4);
#pragma unroll
      for (int n = 0; n < COLS / 8; n++)
        w[n][0] = times(w[n][0], one), w[n][1] = times(w[n][1], two);
    }
    u32 v[4], next[4];
    load_turned(v, value + step * 32 * words);
    if (BITS == 8) load_turned(next, value + step * 32 * words + 32);
    unrolled<4>([&](auto at) {
      constexpr int I = decltype(at)::value;
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (BITS == 8) a[i] = centred<8, I % 2>(I < 2 ? v[i] : next[i]);
        if constexpr (BITS == 4) a[i] = centred<4, I>(v[i]);
        if constexpr (BITS == 2) a[i] = centred<2, I>(v[i] >> (8 * half));
      }
#pragma unroll
      for (int n = 0; n < COLS / 8; n++) take(At<I>(), n, a, w[n]);
    });
  }
}

// Multiplies an item's sums [4 codes][query heads / 8][4] by the factors `by` of query heads 2 c,
// 2 c + 1 .., after their maximum was raised.
__device__ __forceinline__ void fade(float (&sums)[4][COLS / 8][4], const float *by) {
#pragma unroll
  for (int n = 0; n < COLS / 8; n++) {
    const float2 x = *(const float2 *)(by + n * 8);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sums[i][n][0] *= x.x, sums[i][n][1] *= x.y;
      sums[i][n][2] *= x.x, sums[i][n][3] *= x.y;
    }
  }
}

// Stores an item's sums: in `out`, divided by the sums of weights, if the split has the whole item
// of work; otherwise in `part`.
template <int BITS>
__device__ __forceinline__ void finish(
    const float (&sums)[4][COLS / 8][4], const Item &mine, const float *masses,
    bool whole, int lane, u16 *out, float *part) {
  constexpr int PER = 16 / BITS, SIDE = BITS == 8 ? 2 : 4;
  const int c = lane % 4, g = lane / 4;
#pragma unroll
  for (int n = 0; n < COLS / 8; n++) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int column = n * 8 + 2 * c + k % 2;
      const float share = whole ? __fdividef(0.5f, masses[column]) : 0.5f;
      const float size = share * scale_unit(BITS);
#pragma unroll
      for (int i = 0; i < 4; i += SIDE) {  // adjacent numbers
        const int word = mine.block * 16 + (BITS == 8 ? 8 * i : 0) + g + 8 * (k / 2);
        const int number = mine.column + word * PER + (BITS == 2 ? 4 * mine.half : 0);
        if (word >= mine.words) continue;
        float x[SIDE];
#pragma unroll
        for (int j = 0; j < SIDE; j++)
          x[j] = sums[i + j][n][k] * (size / (1 << (BITS * (j % (8 / BITS)))));
        if (whole) {
          u32 two[SIDE / 2];
#pragma unroll
          for (int j = 0; j < SIDE / 2; j++) two[j] = output_of(x[2 * j], x[2 * j + 1]);
          if (is_real(column)) give(out + (u64)real_of(column) * DO + number, two);
        } else {
          give(part + column * DV + number, x);
        }
      }
    }
  }
}

template <class F> __device__ __forceinline__ void with_bits(int bits, F f) {
  if (bits == 8) f(At<8>());
  else if (bits == 4) f(At<4>());
  else f(At<2>());
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) one_pass_kernel(
    const u16 *q, int q_stride, u16 *out, float *lse, float *part, float *part_ml, const u8 *arena,
    const int *tables, int table_slot, int table_group, const int *lengths, int length_slot,
    const u64 *slots, const Item *items, const int *starts, const int *counts,
    double scale_of_scores, const u8 *maps, const u32 *rope) {
  extern __shared__ __align__(128) u8 room[];
  u8 *weights = room + STAGES * PAGE_BYTES;                      // [BUFFERS][COLS][ROW]
  float *fades = (float *)(weights + BUFFERS * WEIGHTS);  // [BUFFERS][COLS]
  float *masses = fades + BUFFERS * COLS;                              // [COLS], sums of weights, at the end of an item
  u32 *faded = (u32 *)(masses + COLS);                           // [BUFFERS][SCORERS]
  u8 *scorers = (u8 *)(faded + BUFFERS * SCORERS);                     // SCORER_BYTES
  const u32 full = shared_of(scorers + SCORER_BYTES), empty = full + 8 * STAGES;
  const u32 ready = empty + 8 * STAGES, done = ready + 8 * BUFFERS;
  // In shared memory, since registers are scarce: the state of the copying thread, and items.
  Pages &ahead = *(Pages *)(scorers + SCORER_BYTES + 16 * (STAGES + BUFFERS));
  Item *all_items = (Item *)(&ahead + 1);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    auto begin = [](u32 barrier, int arrivals) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
    };
    for (int i = 0; i < STAGES; i++) begin(full + 8 * i, 1), begin(empty + 8 * i, SCORERS + WEIGHERS);
    for (int i = 0; i < BUFFERS; i++) begin(ready + 8 * i, SCORERS), begin(done + 8 * i, WEIGHERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  Scorer::prepare(scorers, maps, rope);
  if (threadIdx.x < ITEMS) all_items[threadIdx.x] = items[threadIdx.x];
  __syncthreads();
  const int slice = blockIdx.x;
  const u32 pages = shared_of(room);
  Work work(starts, slice);
  int stage = 0, buffer = 0;
  u32 phase = 0, turn = 0;  // parity of the page buffers, and of the weight buffers

  const int c = lane % 4, g = lane / 4;
  if (warp < SCORERS) {
    const int column = warp * 4 * SETS + c;  // the thread's first query head
    registers_to_score();
    Scorer scorer(scorers, maps, rope, warp, lane, scale_of_scores);
    for (; work.more(); work.next()) {
      if (!work.begin(lengths, length_slot, slots)) continue;
      scorer.begin(q + (u64)work.b * q_stride + work.g * HEADS * REAL * DQ);
      float top[SETS], mass[SETS];
#pragma unroll
      for (int u = 0; u < SETS; u++) top[u] = NONE_YET, mass[u] = 0;
      for (int t = work.tile; t < work.stop; t++) {
        const u8 *page = room + stage * PAGE_BYTES;
        wait(full + 8 * stage, phase);
        const int rows = work.length - t * PAGE;
        float s[STEPS][SETS][2];
        scorer.score(s, page, t, t == work.tile);
        float peak[SETS], fade[SETS];
        bool any = false;
#pragma unroll
        for (int u = 0; u < SETS; u++) {
          peak[u] = NONE_YET;
#pragma unroll
          for (int step = 0; step < STEPS; step++) {
            if (rows < PAGE) {
              if (g + step * 16 >= rows) s[step][u][0] = NONE_YET;
              if (g + step * 16 + 8 >= rows) s[step][u][1] = NONE_YET;
            }
            peak[u] = fmaxf(peak[u], fmaxf(s[step][u][0], s[step][u][1]));
          }
          for (int far = 4; far < 32; far *= 2)
            peak[u] = fmaxf(peak[u], __shfl_xor_sync(~0u, peak[u], far));
          peak[u] *= scorer.unit[u];
          bool raise = peak[u] > top[u] + SLACK || t == work.tile;
          float old = top[u];
          top[u] = raise ? peak[u] : old;
          fade[u] = raise ? exp2_of(old - peak[u]) : 1.0f;
          mass[u] *= fade[u];
          any |= fade[u] != 1.0f;
        }
        any = __any_sync(~0u, any);
        wait(done + 8 * buffer, turn ^ 1);
        u8 *to = weights + buffer * WEIGHTS + column * ROW + 4 * g;
#pragma unroll
        for (int u = 0; u < SETS; u++)
          if (g == 0) fades[buffer * COLS + column + 4 * u] = fade[u];
        if (lane == 0) faded[buffer * SCORERS + warp] = any;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          u32 p[SETS];
#pragma unroll
          for (int u = 0; u < SETS; u++) {
            const float above = exp2_of(s[step][u][0] * scorer.unit[u] - top[u]);
            const float below = exp2_of(s[step][u][1] * scorer.unit[u] - top[u]);
            mass[u] += above + below;
            p[u] = pair_of(above, below);
          }
          const u32 scales =
              WEIGHERS_SCALE ? 0 : scales_of(page, VALUE_SCALE, step * 16 + g, rows);
#pragma unroll
          for (int u = 0; u < SETS; u++)
            *(u32 *)(to + step * 32 + u * 4 * ROW) = WEIGHERS_SCALE ? p[u] : times(p[u], scales);
        }
        __syncwarp();
        if (lane == 0) arrive(ready + 8 * buffer), arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        if (++buffer == BUFFERS) buffer = 0, turn ^= 1;
      }
      for (int i = 0; i < SETS; i++)
        for (int far = 4; far < 32; far *= 2) mass[i] += __shfl_xor_sync(~0u, mass[i], far);
      wait(done + 8 * buffer, turn ^ 1);
      for (int u = 0; g == 0 && u < SETS; u++) {
        const int at = column + 4 * u;
        masses[at] = mass[u];
        if (counts[work.item] == 1) {
          float *to = lse + work.b * QUERY_HEADS + work.g * HEADS * REAL;
          if (is_real(at)) to[real_of(at)] = top[u] + log2f(mass[u]);
        } else {
          float *to = part_ml + (u64)(slice + work.item) * 2 * COLS + at;
          to[0] = top[u], to[COLS] = mass[u];
        }
      }
      __syncwarp();
      if (lane == 0) arrive(ready + 8 * buffer);
      if (++buffer == BUFFERS) buffer = 0, turn ^= 1;
    }
    return;
  }

  auto weigh_pages = [&](auto owned, int first) {
    constexpr int WARP_ITEMS = decltype(owned)::value;
    registers_to_weigh<WARP_ITEMS>();
    if (warp >= SCORERS + WEIGHERS) return;  // only completes a group of four warps
    const Item *mine = all_items + first;
    // One thread copies pages, each into the buffer of the page that all warps have finished.
    const bool copies = warp == SCORERS + WEIGHERS - 1 && lane == 0;
    auto copy = [&]() {
      ahead.copy(pages, full, empty, arena);
      ahead.look_up(tables, table_slot, table_group, lengths, length_slot, slots);
    };
    if (copies) {
      ahead = Pages(starts, slice);
      for (int i = 0; i <= STAGES; i++) copy();  // the first call only looks up a page
    }
    __syncwarp();
    for (; work.more(); work.next()) {
      if (!work.begin(lengths, length_slot, slots)) continue;
      float sums_of[WARP_ITEMS][4][COLS / 8][4] = {};
      for (int t = work.tile; t < work.stop; t++) {
        wait(full + 8 * stage, phase);
        wait(ready + 8 * buffer, turn);
        bool any = false;
#pragma unroll
        for (int w = 0; w < SCORERS; w++) any |= faded[buffer * SCORERS + w] != 0;
        unrolled<WARP_ITEMS>([&](auto o) {
          constexpr int O = decltype(o)::value;
          if (any) fade(sums_of[O], fades + buffer * COLS + 2 * c);
          const Item &it = mine[O];
          auto take = [&](auto at, int n, const u32 (&a)[4], const u32 (&w)[2]) {
            multiply(sums_of[O][decltype(at)::value][n], a, w[0], w[1]);
          };
          auto scales = [&](int row) {
            return scales_of(room + stage * PAGE_BYTES, it.scale, row, work.length - t * PAGE);
          };
          with_bits(it.bits, [&](auto bits) {
            weigh<decltype(bits)::value>(pages + stage * PAGE_BYTES,
                shared_of(weights) + buffer * WEIGHTS, it, lane, scales, take);
          });
        });
        __syncwarp();
        if (lane == 0) arrive(done + 8 * buffer), arrive(empty + 8 * stage);
        if (copies) copy();
        __syncwarp();
        if (++stage == STAGES) stage = 0, phase ^= 1;
        if (++buffer == BUFFERS) buffer = 0, turn ^= 1;
      }
      wait(ready + 8 * buffer, turn);
      const bool whole = counts[work.item] == 1;
      unrolled<WARP_ITEMS>([&](auto o) {
        constexpr int O = decltype(o)::value;
        with_bits(mine[O].bits, [&](auto bits) {
          finish<decltype(bits)::value>(
              sums_of[O], mine[O], masses, whole, lane,
              out + ((u64)work.b * QUERY_HEADS + work.g * HEADS * REAL) * DO,
              part + (u64)(slice + work.item) * COLS * DV);
        });
      });
      __syncwarp();
      if (lane == 0) arrive(done + 8 * buffer);
      if (++buffer == BUFFERS) buffer = 0, turn ^= 1;
    }
  };
  // With more items than warps, the first four warps have two items each.
  constexpr bool TWO = ITEMS > WEIGHERS;
  const int weigher = warp - SCORERS;
  if (TWO && weigher < 4) weigh_pages(At<TWO + 1>(), 2 * weigher);
  else weigh_pages(At<1>(), TWO ? weigher + 4 : weigher);
}
